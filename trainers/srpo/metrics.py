"""What is logged for each update, from the tensors that the update used.

Every figure is about counted units only: scored, with a sampled token. A name may end in what it is about, such as
`clip_fraction_high/K=3`, `/node=solve` or `/agent=solver`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from srpo_env.batch import EventBatch
from srpo_env.trainers.srpo.objective import SRPOLoss


@dataclass(frozen=True)
class Step:
    """One optimiser step.

    Attributes:
        batch: The mini-batch.
        rows: [m] where its rows stand in the whole batch.
        on_policy: Whether the weights were still those of the old log-probs.
        loss: The loss.
        found: Per-unit values; None for an own objective.
        new_logprobs: [m, T] before the step.
        grad_norm: Norm of each stepped policy's gradient before it was clipped.
        seconds_logprobs: Time spent on fresh log-probs.
    """

    batch: EventBatch
    rows: Tensor
    on_policy: bool
    loss: float
    found: SRPOLoss | None
    new_logprobs: Tensor
    grad_norm: dict[str, float] = field(default_factory=dict)
    seconds_logprobs: float = 0.0


def step_metrics(steps: list[Step], batch: EventBatch) -> dict[str, float]:
    """Returns the figures of the optimiser steps: losses, gradients, ratios, clips, completeness."""
    off_policy = [step for step in steps if not step.on_policy]
    norms = [math.hypot(*step.grad_norm.values()) for step in steps if step.grad_norm]
    metrics = {
        "loss": _mean([step.loss for step in steps]),
        "grad_norm": _mean(norms),
        "grad_norm_max": max(norms, default=math.nan),
        "steps": float(len(steps)),
        "approx_kl": _mean([_approx_kl(step) for step in off_policy]),
        "event_completeness": event_completeness(steps, batch),
        **_ratios([step for step in steps if step.found is not None]),
    }
    for label in sorted({label for step in steps for label in step.grad_norm}):
        metrics[f"grad_norm/policy={label}"] = _mean([s.grad_norm[label] for s in steps if label in s.grad_norm])
    return metrics


def _ratios(steps: list[Step]) -> dict[str, float]:
    if not steps:
        return {}
    found = [step.found for step in steps if step.found is not None]
    log_ratio = torch.cat([each.log_ratio[each.counted] for each in found])
    ratio = torch.cat([each.ratio[each.counted] for each in found])
    clamped = torch.cat([each.ratio_clamped[each.counted] for each in found])
    metrics = {
        "ratio_mean": _tensor_mean(ratio),
        "ratio_min": float(ratio.min()) if len(ratio) else math.nan,
        "ratio_max": float(ratio.max()) if len(ratio) else math.nan,
        "ratio_clamped": float(clamped.sum()),
        "log_ratio_std": float(log_ratio.double().std(correction=0)) if len(log_ratio) else math.nan,
    }
    off_policy = [step for step in steps if not step.on_policy]
    metrics |= _clip_fractions(steps, "") | _clip_fractions(off_policy, "_off_policy")
    return metrics | _by_kind(off_policy)


def _clip_fractions(steps: list[Step], suffix: str) -> dict[str, float]:
    """Share of counted units with A != 0 whose clip binds; low where A < 0, high where A > 0."""
    low, high, units = 0, 0, 0
    for step in steps:
        found = step.found
        assert found is not None
        units += int((found.counted & (found.advantage != 0)).sum())
        low += int((found.clipped & (found.advantage < 0)).sum())
        high += int((found.clipped & (found.advantage > 0)).sum())
    share = [math.nan] * 3 if not units else [(low + high) / units, low / units, high / units]
    names = ("clip_fraction", "clip_fraction_low", "clip_fraction_high")
    return {f"{name}{suffix}": value for name, value in zip(names, share, strict=True)}


def _by_kind(steps: list[Step]) -> dict[str, float]:
    """Off-policy clip fractions by K, node and agent, and the variance of L_e by K, where a unit is an event."""
    at_set = [step for step in steps if step.found is not None and len(step.found.counted) == step.batch.num_events]
    if not at_set:
        return {}
    found = [step.found for step in at_set if step.found is not None]
    counted = torch.cat([each.counted for each in found])
    active = counted & (torch.cat([each.advantage for each in found]) != 0)
    clipped = torch.cat([each.clipped for each in found])
    positive = torch.cat([each.advantage for each in found]) > 0
    log_ratio = torch.cat([each.log_ratio for each in found]).double()
    size = torch.cat([each.set_size for each in found])
    kinds = {f"K={k}": size == k for k in size[counted].unique().tolist()}
    names = at_set[0].batch.names
    node = torch.cat([step.batch.node for step in at_set])
    kinds |= {f"node={name}": node == code for code, name in enumerate(names["node"])}
    for code, name in enumerate(names["agent"]):
        has = [
            torch.zeros(s.batch.num_events, dtype=torch.bool).index_fill(0, s.batch.event[s.batch.agent == code], True)
            for s in at_set
        ]
        kinds[f"agent={name}"] = torch.cat(has)
    metrics: dict[str, float] = {}
    for name, those in kinds.items():
        units = int((active & those).sum())
        if units:
            metrics[f"clip_fraction_low/{name}"] = float((clipped & those & ~positive).sum()) / units
            metrics[f"clip_fraction_high/{name}"] = float((clipped & those & positive).sum()) / units
        if name.startswith("K=") and (counted & those).any():
            metrics[f"log_ratio_variance/{name}"] = float(log_ratio[counted & those].var(correction=0))
    return metrics


def _approx_kl(step: Step) -> float:
    """Mean over sampled tokens of k3 = exp(d) - d - 1, d = new - old: an estimate of KL(old || new), in nats."""
    assert step.batch.old_logprobs is not None
    difference = (step.new_logprobs - step.batch.old_logprobs)[step.batch.mask].double()
    return _tensor_mean(difference.clamp(max=20).exp() - difference - 1)


def event_completeness(steps: list[Step], batch: EventBatch) -> float:
    """Share of events whose trained members all stood in one and the same optimiser step, in every pass.

    Counted from the batch's own rows against the rows that the steps report: 1.0 unless an event was split or lost.
    """
    trained = batch.mask.any(1)
    places: dict[int, Counter[tuple[int, ...]]] = {}
    wanted: dict[int, list[int]] = {}
    for row, event in enumerate(batch.event.tolist()):
        if trained[row]:
            wanted.setdefault(event, []).append(row)
    event_of = batch.event.tolist()
    for step in steps:
        members: dict[int, list[int]] = {}
        for row in step.rows.tolist():
            if trained[row]:
                members.setdefault(event_of[row], []).append(row)
        for event, rows in members.items():
            places.setdefault(event, Counter())[tuple(sorted(rows))] += 1
    whole = sum(len(places.get(event, ())) == 1 and tuple(rows) in places[event] for event, rows in wanted.items())
    return whole / len(wanted) if wanted else math.nan


def batch_metrics(batch: EventBatch, advantage: Tensor, entropy: Tensor | None) -> dict[str, float]:
    """Returns the figures of the batch: rewards, sets, advantages, outputs by agent."""
    last = batch.terminated | batch.truncated
    reward = batch.reward[last]
    size = torch.zeros(batch.num_events, dtype=torch.int64).index_add(0, batch.event, batch.mask.any(1).long())
    tokens = batch.mask.sum(1)
    trained = batch.mask.any(1)
    of_event = advantage if len(advantage) == batch.num_events else None
    metrics = {
        "reward_mean": _tensor_mean(reward[~reward.isnan()]),
        "reward_std": float(reward[~reward.isnan()].std(correction=0)) if (~reward.isnan()).any() else math.nan,
        "unscored": float(reward.isnan().sum()),
        "events": float(batch.num_events),
        "set_size_mean": _tensor_mean(size[size > 0].double()),
        "share_of_sets_over_1": _tensor_mean((size[size > 0] > 1).double()),
        "entropy": _tensor_mean(entropy[batch.mask].double()) if entropy is not None else math.nan,
        "tokens_trained": float(tokens.sum()),
        "sets_of_mixed_versions": float(_mixed_versions(batch)),
        "sampler_mismatch": _mismatch(batch),
    }
    metrics |= {f"sets/K={k}": float((size == k).sum()) for k in size[size > 0].unique().tolist()}
    for code, name in enumerate(batch.names["agent"]):
        mine = (batch.agent == code) & trained
        if not mine.any():
            continue
        length = batch.names["finish_reason"].index("length") if "length" in batch.names["finish_reason"] else -1
        metrics[f"output_tokens/agent={name}"] = _tensor_mean(tokens[mine].double())
        metrics[f"truncation_rate/agent={name}"] = _tensor_mean((batch.finish_reason[mine] == length).double())
        metrics[f"parse_failure_rate/agent={name}"] = _tensor_mean((~batch.parse_ok[mine]).double())
        if of_event is not None:
            metrics[f"advantage/agent={name}"] = _tensor_mean(of_event[batch.event[mine].unique()])
    if of_event is not None:
        metrics |= {
            f"advantage/node={name}": _tensor_mean(of_event[batch.node == code])
            for code, name in enumerate(batch.names["node"])
        }
    return metrics


def _mixed_versions(batch: EventBatch) -> int:
    """Sets whose trained members of one policy were sampled by different versions of it."""
    seen: dict[tuple[int, int], set[int]] = {}
    rows = torch.nonzero(batch.mask.any(1)).flatten().tolist()
    for row in rows:
        key = (int(batch.event[row]), int(batch.policy[row]))
        seen.setdefault(key, set()).add(int(batch.policy_version[row]))
    return sum(len(versions) > 1 for versions in seen.values())


def _mismatch(batch: EventBatch) -> float:
    """Mean absolute difference per token between the sampler's log-probs and the learner's, in nats."""
    if batch.old_logprobs is None:
        return math.nan
    known = batch.mask & ~batch.sampler_logprobs.isnan() & batch.processed.unsqueeze(1)
    return _tensor_mean((batch.old_logprobs - batch.sampler_logprobs)[known].abs().double())


def _tensor_mean(values: Tensor) -> float:
    values = values.double()
    values = values[~values.isnan()]
    return float(values.mean()) if len(values) else math.nan


def _mean(values: list[float]) -> float:
    values = [value for value in values if not math.isnan(value)]
    return sum(values) / len(values) if values else math.nan
