"""What is logged about sampled events, whoever learns from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from srpo_env.graph import Graph
from srpo_env.records import Event
from srpo_env.spec import Choose


def sampling_metrics(events: Sequence[Event], graph: Graph) -> dict[str, float]:
    """Returns counts and costs of sampling: tokens, tool calls, set sizes, routes.

    `set_size_without_routers` leaves out the events of nodes that choose another node's members: the paper's 1.638 does
    not say whether they are in.
    """
    members = [member for event in events for member in event.members]
    calls = [call for member in members for call in member.tool_calls]
    routers = _routers(graph)
    plain = [len(event.members) for event in events if event.node not in routers]
    ended = [event for event in events if event.terminated or event.truncated]
    metrics = {
        "tokens_sampled": float(sum(len(member.output.output_ids or ()) for member in members)),
        "tool_calls": float(len(calls)),
        "seconds_tools": math.fsum(call.seconds for call in calls),
        "episodes": float(len(ended)),
        "events_per_episode": len(events) / len(ended) if ended else math.nan,
        "episodes_truncated": sum(event.truncated for event in ended) / len(ended) if ended else math.nan,
        "policy_errors": float(sum(event.truncated_by == "policy_error" for event in events)),
        "tools_unavailable": float(sum(event.truncated_by == "tool_unavailable" for event in events)),
    }
    if routers:
        metrics["set_size_without_routers"] = sum(plain) / len(plain) if plain else math.nan
    for node in graph.workflow.nodes:
        routes = Counter(event.next_node for event in events if event.node == node and not event.truncated)
        if len(routes) > 1:
            metrics[f"route_entropy/node={node}"] = _entropy(list(routes.values()))
    return metrics


def _routers(graph: Graph) -> set[str]:
    """Nodes whose output another node's `choose` reads."""
    nodes = graph.workflow.nodes
    expressions = [node.agents.choose for node in nodes.values() if isinstance(node.agents, Choose)]
    return {name for name in nodes if any(text.startswith(f"{name}.") for text in expressions)}


def _entropy(counts: Sequence[int]) -> float:
    """Entropy of a distribution given by counts, in nats."""
    total = sum(counts)
    return -sum(count / total * math.log(count / total) for count in counts if count)
