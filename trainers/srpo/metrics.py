"""What is logged for each update, from the tensors that the update used.

Figures of units are about counted ones only: scored, with a sampled token. A name may end in what it is about, such as
`clip_fraction_high/K=3`, `/node=solve` or `/agent=solver`: a unit is about an agent if one of its members is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from srpo_env.batch import EventBatch
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.divergence import KLKind, entropy_estimate, kl_per_token
from srpo_env.trainers.srpo.estimators import GroupCount
from srpo_env.trainers.srpo.importance import truncated_importance
from srpo_env.trainers.srpo.objective import RatioLevel, SRPOLoss, srpo_loss


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
        grad_norm_by_size: Norm of what the sets of each size bring to it, where asked for.
        seconds_logprobs: Time spent on fresh log-probs.
    """

    batch: EventBatch
    rows: Tensor
    on_policy: bool
    loss: float
    found: SRPOLoss | None
    new_logprobs: Tensor
    grad_norm: dict[str, float] = field(default_factory=dict)
    grad_norm_by_size: dict[int, float] = field(default_factory=dict)
    seconds_logprobs: float = 0.0


# ------------------------------------------------------------------------------ the optimiser's steps


def step_metrics(steps: list[Step], batch: EventBatch, config: SRPOConfig) -> dict[str, float]:
    """Returns the figures of the optimiser steps: losses, gradients, ratios, clips, completeness."""
    off_policy = [step for step in steps if not step.on_policy]
    norms = [math.hypot(*step.grad_norm.values()) for step in steps if step.grad_norm]
    metrics = {
        "loss": _mean([step.loss for step in steps]),
        "grad_norm": _mean(norms),
        "grad_norm_max": max(norms, default=math.nan),
        "steps": float(len(norms)),
        "approx_kl": _approx_kl(off_policy),
        "event_completeness": event_completeness(steps, batch, config.epochs),
    }
    for label in dict.fromkeys(label for step in steps for label in step.grad_norm):
        metrics[f"grad_norm/policy={label}"] = _mean([s.grad_norm[label] for s in steps if label in s.grad_norm])
        metrics[f"grad_share/policy={label}"] = _mean(
            [s.grad_norm.get(label, 0.0) ** 2 / total**2 for s in steps if (total := math.hypot(*s.grad_norm.values()))]
        )
    for k in sorted({k for step in steps for k in step.grad_norm_by_size}):
        metrics[f"grad_norm/K={k}"] = _mean([s.grad_norm_by_size[k] for s in steps if k in s.grad_norm_by_size])
    if config.kl_coefficient:
        metrics |= {
            "kl_to_reference": _kl_to_reference(steps, "k3"),
            "kl_to_reference_k1": _kl_to_reference(steps, "k1"),
        }
    if all(step.found is not None for step in steps):
        metrics |= _ratios(steps) | _clip_fractions(steps, "") | _clip_fractions(off_policy, "_off_policy")
        metrics |= _by_kind(off_policy, config)
    return metrics


def _ratios(steps: list[Step]) -> dict[str, float]:
    found = [step.found for step in steps if step.found is not None]
    log_ratio = _joined([each.log_ratio[each.counted] for each in found])
    ratio = _joined([each.ratio[each.counted] for each in found])
    return {
        "ratio_mean": _tensor_mean(ratio),
        "ratio_min": float(ratio.min()) if len(ratio) else math.nan,
        "ratio_max": float(ratio.max()) if len(ratio) else math.nan,
        "ratio_clamped": float(sum(int(each.ratio_clamped.sum()) for each in found)),
        "log_ratio_std": _tensor_std(log_ratio),
    }


def _clip_fractions(steps: list[Step], suffix: str) -> dict[str, float]:
    """Share of counted units with A != 0 whose clip binds; low where A < 0, high where A > 0."""
    low, high, units = 0, 0, 0
    for step in steps:
        assert step.found is not None
        below, above, number = _clips(step.found, step.found.counted)
        low, high, units = low + below, high + above, units + number
    share = [math.nan] * 3 if not units else [(low + high) / units, low / units, high / units]
    names = ("clip_fraction", "clip_fraction_low", "clip_fraction_high")
    return {f"{name}{suffix}": value for name, value in zip(names, share, strict=True)}


def _clips(found: SRPOLoss, those: Tensor) -> tuple[int, int, int]:
    """How many of some counted units are clipped low, clipped high, and have an advantage at all."""
    clipped, advantage = found.clipped[those], found.advantage[those]
    return (
        int((clipped & (advantage < 0)).sum()),
        int((clipped & (advantage > 0)).sum()),
        int((advantage != 0).sum()),
    )


def _by_kind(steps: list[Step], config: SRPOConfig) -> dict[str, float]:
    """Off-policy clip fractions by K, node and agent, and the variance of L_u by K: the claim behind 1/sqrt(K)."""
    clips: dict[str, list[int]] = {}
    log_ratios: dict[str, list[Tensor]] = {}
    for step in steps:
        assert step.found is not None
        for name, those in _kinds(step, step.found, config):
            clips[name] = [a + b for a, b in zip(clips.get(name, (0, 0, 0)), _clips(step.found, those), strict=True)]
            if name.startswith("K="):
                log_ratios.setdefault(name, []).append(step.found.log_ratio[those])
    metrics = {}
    for name, (low, high, units) in clips.items():
        if units:
            metrics[f"clip_fraction_low/{name}"] = low / units
            metrics[f"clip_fraction_high/{name}"] = high / units
    for name, parts in log_ratios.items():
        metrics[f"log_ratio_variance/{name}"] = _tensor_std(_joined(parts)) ** 2
    return metrics


def _kinds(step: Step, found: SRPOLoss, config: SRPOConfig) -> Iterator[tuple[str, Tensor]]:
    """Which counted units are about a K, a node or an agent; at level trajectory, K counts the episode's members."""
    batch = step.batch
    unit = {
        "set": batch.event,
        "trajectory": batch.episode[batch.event],
        "member": torch.arange(batch.num_members),
        "token": torch.arange(batch.num_members),
    }[config.ratio_level]
    counted = found.counted if found.counted.dim() == 1 else found.counted.any(1)
    size = found.set_size[batch.event]
    if config.ratio_level == "trajectory":
        active = batch.mask.any(1) & (size > 0)
        size = torch.bincount(unit[active], minlength=len(counted))[unit]
    kinds = [(f"K={k}", size == k) for k in size[size > 0].unique().tolist()]
    for name, codes in (("node", batch.node[batch.event]), ("agent", batch.agent)):
        kinds += [(f"{name}={text}", codes == code) for code, text in enumerate(batch.names[name])]
    for name, rows in kinds:
        those = counted & torch.zeros_like(counted).index_fill(0, unit[rows & batch.mask.any(1)], value=True)
        if bool(those.any()):
            yield name, those if found.counted.dim() == 1 else found.counted & those.unsqueeze(1)


def _approx_kl(steps: list[Step]) -> float:
    """Mean over sampled tokens of k3, an estimate of KL(old || new) in nats: the tokens are of the old policy."""
    parts = []
    for step in steps:
        batch = step.batch
        assert batch.old_logprobs is not None
        parts.append(kl_per_token(batch.old_logprobs, step.new_logprobs, batch.mask)[batch.mask])
    return _tensor_mean(_joined(parts))


def _kl_to_reference(steps: list[Step], kind: KLKind) -> float:
    """Mean over sampled tokens, in nats, before each step; k1 may be negative, and is for the log only."""
    parts = []
    for step in steps:
        batch = step.batch
        assert batch.ref_logprobs is not None
        parts.append(kl_per_token(step.new_logprobs, batch.ref_logprobs, batch.mask, kind)[batch.mask])
    return _tensor_mean(_joined(parts))


def event_completeness(steps: list[Step], batch: EventBatch, epochs: int = 1) -> float:
    """Share of events whose trained members all stood in one and the same optimiser step, once in every epoch.

    Counted from the batch's own rows against the rows that the steps report: 1.0 unless an event was split, lost or
    doubled.
    """
    trained = batch.mask.any(1)
    wanted = torch.bincount(batch.event[trained], minlength=batch.num_events)
    whole = torch.zeros_like(wanted)
    broken = torch.zeros_like(wanted, dtype=torch.bool)
    for step in steps:
        rows = step.rows[trained[step.rows]]
        there = torch.bincount(batch.event[rows], minlength=batch.num_events)
        different = torch.bincount(batch.event[rows.unique()], minlength=batch.num_events)
        complete = (there == wanted) & (different == wanted)
        whole += complete
        broken |= (there > 0) & ~complete
    return _tensor_mean(((whole == epochs) & ~broken)[wanted > 0])


# ---------------------------------------------------------------------------------------- the batch


def batch_metrics(
    batch: EventBatch,
    sampled: EventBatch,
    advantage: Tensor,
    entropy: Tensor | None,
    groups: GroupCount | None,
    config: SRPOConfig,
) -> dict[str, float]:
    """Returns the figures of the batch: rewards, sets, advantages, outputs by agent.

    Args:
        batch: Trained rows, with old log-probs.
        sampled: The same with the tokens of frozen policies, too.
        advantage: [M].
        entropy: [M, T] in nats; None where old log-probs are the sampler's: they estimate it.
        groups: What the estimator compared within; None for an own one.
        config: Settings.
    """
    size = torch.bincount(batch.event[batch.mask.any(1)], minlength=batch.num_events)
    sizes = size[size > 0]
    metrics = {
        **_rewards(batch),
        "events": float(batch.num_events),
        "set_size_mean": _tensor_mean(sizes),
        "share_of_sets_over_1": _tensor_mean(sizes > 1),
        "entropy": _entropy(batch) if entropy is None else _tensor_mean(entropy[batch.mask]),
        "tokens_trained": float(batch.mask.sum()),
        "sets_of_mixed_versions": float(_mixed_versions(batch)),
        "groups_without_signal": groups.groups_without_signal / groups.groups if groups and groups.groups else math.nan,
    }
    metrics |= {f"sets/K={k}": float((sizes == k).sum()) for k in sizes.unique().tolist()}
    if config.old_logprobs == "recompute":
        metrics |= _mismatch(batch, config)
    if config.tis_cap is not None:
        found = truncated_importance(batch, advantage, config)
        metrics["tis_weight_mean"] = _tensor_mean(found.weight[found.counted])
        metrics["tis_capped"] = _tensor_mean(found.capped[found.counted])
    return metrics | _by_agent_and_node(sampled, advantage, batch.mask.any(1))


def _entropy(batch: EventBatch) -> float:
    """Mean over sampled tokens, estimated from their own log-probs."""
    assert batch.old_logprobs is not None
    return float(entropy_estimate(batch.old_logprobs, batch.mask).sum() / batch.mask.sum())


def _rewards(batch: EventBatch) -> dict[str, float]:
    """Undiscounted returns of the episodes."""
    returns = torch.full((len(batch.names["episode"]),), torch.nan, dtype=torch.float64)
    returns[batch.episode] = batch.returns()
    here = returns[batch.episode.unique()]
    return {
        "reward_mean": _tensor_mean(here),
        "reward_std": _tensor_std(here[~here.isnan()]),
        "unscored": float(here.isnan().sum()),
    }


def _by_agent_and_node(batch: EventBatch, advantage: Tensor, trained: Tensor) -> dict[str, float]:
    """Outputs by agent, frozen ones too; mean advantage of the trained rows by agent and node."""
    cut_off = batch.names["finish_reason"].index("length") if "length" in batch.names["finish_reason"] else -1
    tokens = batch.mask.sum(1)
    metrics = {}
    for code, name in enumerate(batch.names["agent"]):
        mine = batch.agent == code
        metrics[f"output_tokens/agent={name}"] = _tensor_mean(tokens[mine])
        metrics[f"truncation_rate/agent={name}"] = _tensor_mean(batch.finish_reason[mine] == cut_off)
        metrics[f"parse_failure_rate/agent={name}"] = _tensor_mean(~batch.parse_ok[mine])
        metrics[f"advantage/agent={name}"] = _tensor_mean(advantage[mine & trained])
    for code, name in enumerate(batch.names["node"]):
        metrics[f"advantage/node={name}"] = _tensor_mean(advantage[(batch.node[batch.event] == code) & trained])
    return metrics


def _mixed_versions(batch: EventBatch) -> int:
    """Sets whose trained members of one policy were sampled by different versions of it."""
    rows = batch.mask.any(1)
    versions = torch.stack([batch.event, batch.policy, batch.policy_version], dim=1)[rows].unique(dim=0)
    _, number = versions[:, :2].unique(dim=0, return_inverse=True)
    mixed = torch.bincount(number) > 1
    return int(versions[mixed[number], 0].unique().numel())


def _mismatch(batch: EventBatch, config: SRPOConfig) -> dict[str, float]:
    """Mean absolute log-ratio between the learner's log-probs and the sampler's: per token, member and set, in nats."""
    assert batch.old_logprobs is not None
    known = batch.mask & ~batch.sampler_logprobs.isnan() & (batch.processed | (batch.temperature == 1)).unsqueeze(1)
    metrics = {}
    levels: tuple[RatioLevel, ...] = ("token", "member", "set")
    for level in levels:
        found = srpo_loss(
            batch.old_logprobs,
            batch.sampler_logprobs,
            known,
            batch.event,
            torch.zeros(batch.num_events),
            clip_low=math.inf,
            clip_high=math.inf,
            set_norm=config.set_norm,
            length_norm=config.length_norm,
            ratio_level=level,
        )
        metrics[f"sampler_mismatch_{level}"] = _tensor_mean(found.log_ratio[found.counted].abs())
    return metrics


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0)


def _tensor_mean(values: Tensor) -> float:
    values = values.double()
    values = values[~values.isnan()]
    return float(values.mean()) if len(values) else math.nan


def _tensor_std(values: Tensor) -> float:
    return float(values.double().std(correction=0)) if len(values) else math.nan


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
