"""What the objective's tests share: mini-batches worked out by hand or at random, and their losses."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from srpo_env.trainers.srpo.objective import (
    SRPOLoss,
    srpo_loss,
)

LEVELS = ("set", "member", "token", "trajectory")
SET_NORMS = ("sqrt", "sum", "mean")
LENGTH_NORMS = ("mean", "sum")
REDUCTIONS = ("event", "episode", "member", "token", "constant")
NAN = math.nan
MOST_EPISODES = 4
Settings = dict[str, Any]


@dataclass(frozen=True)
class Batch:
    """A mini-batch: tensors in the axes of `srpo_loss`, NaN wherever nothing was sampled."""

    new: Tensor
    old: Tensor
    mask: Tensor
    event: Tensor
    advantage: Tensor  # [E]
    episode: Tensor  # [E]

    def rows(self, chosen: Tensor) -> "Batch":
        return replace(
            self,
            new=self.new[chosen],
            old=self.old[chosen],
            mask=self.mask[chosen],
            event=self.event[chosen],
        )


def make_batch(shape: Sequence[Sequence[Sequence[int]]], seed: int, *, spread: float, by_episode: bool) -> Batch:
    """Episodes of events of members, given as their numbers of sampled tokens."""
    rng = np.random.default_rng(seed)
    events = [members for episode in shape for members in episode]
    lengths = [n for members in events for n in members]
    width = max(lengths, default=0) + 2
    old = np.full((len(lengths), width), NAN)
    mask = np.zeros((len(lengths), width))
    new = old.copy()
    for row, n in enumerate(lengths):
        places = rng.permutation(width)[:n]
        mask[row, places] = 1
        old[row, places] = -rng.exponential(size=n)
        new[row, places] = old[row, places] + spread * rng.normal(size=n)
    values = rng.normal(size=len(events))
    values[rng.random(len(events)) < 0.15] = 0.0
    values[rng.random(len(events)) < 0.15] = NAN
    episode = np.array([i for i, one in enumerate(shape) for _ in one], dtype=int)
    if by_episode:
        values = values[[int((episode == i).argmax()) for i in episode]]
    return Batch(
        torch.tensor(new),
        torch.tensor(old),
        torch.tensor(mask),
        torch.tensor([e for e, members in enumerate(events) for _ in members], dtype=torch.int64),
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(episode),
    )


_sizes = list(itertools.product((1, 3), (1, 4), (1, 4)))  # events, members, tokens: at most
seeds = st.integers(0, 2**32 - 2)
_settings = [
    {
        "ratio_level": level,
        "set_norm": set_norm,
        "length_norm": length_norm,
        "reduction": reduction,
        "clip_low": low,
        "clip_high": high,
        "constant_length": 7.0,
    }
    for level, set_norm, length_norm, reduction, (low, high) in itertools.product(
        LEVELS,
        SET_NORMS,
        LENGTH_NORMS,
        REDUCTIONS,
        [(0.2, 0.3), (0.1, 0.1), (1.0, 0.3), (0.2, math.inf), (math.inf, math.inf)],
    )
]


@st.composite
def cases(draw: st.DrawFn, /, **fixed: str) -> tuple[Batch, Settings]:
    """A batch and settings that fit it; no log-ratio lies so near a bound that rounding decides.

    Hypothesis draws the sizes and a seed, which draws the rest: many draws would take longer than the tests.
    """
    seed = draw(seeds)
    rng = np.random.default_rng(seed)
    chosen: Settings = {**_settings[rng.integers(len(_settings))], **fixed}
    most_events, most_members, most_tokens = draw(st.sampled_from(_sizes))
    shape = [
        [
            list(rng.integers(0, most_tokens + 1, rng.integers(1, most_members + 1)))
            for _ in range(rng.integers(1, most_events + 1))
        ]
        for _ in range(draw(st.integers(1, MOST_EPISODES)))
    ]
    batch = make_batch(
        shape,
        seed,
        spread=rng.choice([0.1, 0.5, 2.0]),
        by_episode=chosen["ratio_level"] == "trajectory",
    )
    assume(not near_a_bound(batch, chosen))
    return batch, chosen


def shuffled(size: int, seed: int) -> Tensor:
    return torch.tensor(np.random.default_rng(seed).permutation(size))


def near_a_bound(batch: Batch, chosen: Settings, margin: float = 1e-5) -> bool:
    bounds = [math.log1p(chosen["clip_high"]), 20.0]
    bounds += [math.log1p(-chosen["clip_low"])] if chosen["clip_low"] < 1 else []
    log_ratio = loss_of(batch, chosen).log_ratio
    return any(bool(((log_ratio - bound).abs() < margin).any()) for bound in bounds)


def loss_of(batch: Batch, chosen: Settings, **more: Any) -> SRPOLoss:
    everything: Settings = {"episode": batch.episode, **chosen, **more}
    advantage = everything.pop("advantage", batch.advantage)
    return srpo_loss(batch.new, batch.old, batch.mask, batch.event, advantage, **everything)


def loss_and_gradient(batch: Batch, chosen: Settings, **more: Any) -> tuple[SRPOLoss, Tensor]:
    leaf = batch.new.clone().requires_grad_()
    out = loss_of(replace(batch, new=leaf), chosen, **more)
    (gradient,) = torch.autograd.grad(out.loss, leaf)
    return out._replace(loss=out.loss.detach()), gradient


def assert_same(a: tuple[SRPOLoss, Tensor], b: tuple[SRPOLoss, Tensor], tolerance: float = 1e-10) -> None:
    """The same loss and gradient, relative to the largest term and the largest entry."""
    largest = float((a[0].ratio * a[0].advantage).abs().sum()) + 1e-30
    assert abs(float(a[0].loss - b[0].loss)) <= tolerance * largest
    assert_same_gradient(a[1], b[1], tolerance)


def assert_same_gradient(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    assert a.shape == b.shape
    assert bool(a.isfinite().all())
    assert float((a - b).abs().sum()) <= tolerance * float(a.abs().sum())


def one_token(
    log_ratios: Sequence[float],
    event: Sequence[int],
    advantage: Sequence[float],
    **chosen: Any,
) -> tuple[SRPOLoss, Tensor]:
    """Rows of one token each, whose log-ratios are given; clip 0.2 on both sides unless told."""
    new = torch.tensor(log_ratios, dtype=torch.float64).unsqueeze(1).requires_grad_()
    out = srpo_loss(
        new,
        torch.zeros_like(new),
        torch.ones_like(new),
        torch.tensor(event),
        torch.tensor(advantage, dtype=torch.float64),
        **{"clip_low": 0.2, "clip_high": 0.2, **chosen},
    )
    (gradient,) = torch.autograd.grad(out.loss, new)
    return out._replace(loss=out.loss.detach()), gradient


# Three events of two episodes. Rows, by sampled tokens:  event 0: [2]   event 1: [1, 3]   event 2: [3]
# Episodes: events 0 and 1, event 2.   E = 3, N = 2, M = 4, T = 9.
HAND = Batch(
    new=torch.zeros(4, 3, dtype=torch.float64),
    old=torch.zeros(4, 3, dtype=torch.float64),
    mask=torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]]),
    event=torch.tensor([0, 1, 1, 2]),
    advantage=torch.tensor([1.0, 2.0, -4.0], dtype=torch.float64),
    episode=torch.tensor([0, 0, 1]),
)
CLIP: Settings = {"clip_low": 0.2, "clip_high": 0.2}
