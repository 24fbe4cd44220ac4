"""Are the counts and costs of sampling those that a hand gets?"""

import math
from collections.abc import Callable
from typing import Any

import pytest

from srpo_env.graph import Graph
from srpo_env.records import ToolCall
from srpo_env.sampling_metrics import sampling_metrics

Make = Callable[..., Any]

ROUTER = """
name: router
agents:
  router: {prompt: "?", parse: {use: text, choices: [one, two], fallback: one}}
  solver: {prompt: "?"}
nodes:
  route: {agents: router, next: work}
  work: {agents: {choose: route.parsed, among: {one: solver, two: {solver: 2}}, else: solver}, reduce: concat}
answer: work.text
"""


@pytest.fixture
def graph(compiled: Callable[..., Graph]) -> Graph:
    return compiled("solver_verifier")


def test_tokens_and_calls_are_added_up(graph: Graph, event: Make, member: Make) -> None:
    call = ToolCall(tool="x", arguments={}, result="", seconds=0.5)
    events = [event([member(output_ids=(1, 2)), member(output_ids=None)]), event([member(tool_calls=(call, call))])]
    found = sampling_metrics(events, graph)
    assert (found["tokens_sampled"], found["tool_calls"], found["seconds_tools"]) == (2.0, 2.0, 1.0)


def test_episodes_are_counted_by_their_ends(graph: Graph, event: Make) -> None:
    events = [
        event(terminated=False),
        event(step=1),
        event(episode="b", terminated=False),
        event(episode="b", step=1, terminated=False),
        event(episode="b", step=2, terminated=False, truncated=True, truncated_by="steps"),
    ]
    found = sampling_metrics(events, graph)
    assert (found["episodes"], found["events_per_episode"], found["episodes_truncated"]) == (2.0, 2.5, 0.5)


def test_without_an_end_there_is_no_mean(graph: Graph) -> None:
    found = sampling_metrics([], graph)
    assert math.isnan(found["events_per_episode"])
    assert math.isnan(found["episodes_truncated"])


def test_only_a_policy_that_failed_is_a_policy_error(graph: Graph, event: Make, member: Make) -> None:
    failed = [member("", error="x"), member("", error="y")]
    events = [
        event(failed, terminated=False, truncated=True, truncated_by="policy_error"),
        event(failed, terminated=False, truncated=True, truncated_by="context"),
        event(),
    ]
    assert sampling_metrics(events, graph)["policy_errors"] == 1.0


def test_set_sizes_are_also_told_without_routers(compiled: Callable[..., Graph], event: Make, member: Make) -> None:
    events = [event(node="route"), event([member()] * 2, node="work"), event([member()], node="work")]
    assert sampling_metrics(events, compiled(ROUTER))["set_size_without_routers"] == 1.5


def test_a_workflow_without_a_router_has_no_such_figure(graph: Graph, event: Make) -> None:
    assert "set_size_without_routers" not in sampling_metrics([event()], graph)


def test_the_entropy_of_routes_is_that_of_where_a_node_went(graph: Graph, event: Make) -> None:
    """3 of 4 to the end: -(3/4 ln 3/4 + 1/4 ln 1/4) = 0.5623."""
    events = [event(node="verify", next_node=to) for to in ("end", "end", "end", "solve")]
    found = sampling_metrics([*events, event(node="verify", next_node="solve", truncated=True)], graph)
    assert found["route_entropy/node=verify"] == pytest.approx(0.562335)


def test_a_node_that_always_goes_the_same_way_has_no_entropy(graph: Graph, event: Make) -> None:
    assert "route_entropy/node=solve" not in sampling_metrics([event(next_node="verify")] * 3, graph)
