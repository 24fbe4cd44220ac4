"""Is the loss the one of the contract? Hand-worked numbers, a NumPy reference, properties, reports.

`hand` numbers are worked out in the comments; `reference.py` says everything again in plain loops.
"""

import doctest
import importlib.util
import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from srpo_env.errors import InvalidInput
from srpo_env.trainers.srpo import divergence, objective, weights
from srpo_env.trainers.srpo.divergence import entropy_estimate, kl_penalty, kl_per_token
from srpo_env.trainers.srpo.objective import (
    SRPOLoss,
    clipped_surrogate,
    set_log_ratio,
    srpo_loss,
)
from srpo_env.trainers.srpo.weights import Counts, count, token_weights

_spec = importlib.util.spec_from_file_location("reference", Path(__file__).with_name("reference.py"))
assert _spec is not None
assert _spec.loader is not None
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)

LEVELS = ("set", "member", "token", "trajectory")
SET_NORMS = ("sqrt", "sum", "mean")
LENGTH_NORMS = ("mean", "sum")
REDUCTIONS = ("event", "episode", "member", "token", "constant")
NAN = math.nan
MOST_EPISODES = 4
Settings = dict[str, Any]


# ------------------------------------------------------------------------------------- batches


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
_seeds = st.integers(0, 2**32 - 2)
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
    seed = draw(_seeds)
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


# ----------------------------------------------------------------------------- worked out by hand

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


def test_a_set_of_two_gives_the_loss_and_gradient_worked_out_by_hand() -> None:
    # Member 0 has token log-ratios 0.2 and 0.4: l = 0.3. Member 1 has 0.1: l = 0.1.
    # L = (0.3 + 0.1) / sqrt 2 = 0.28284271, rho = 1.32689671, A = 2, clip 0.5: does not bind.
    # s = 2.65379341. d loss / d log pi = -A rho / sqrt 2 / n_i = -1.87651532 / n_i.
    batch = Batch(
        new=torch.tensor([[-1.0, -2.0], [-3.0, NAN]], dtype=torch.float64),
        old=torch.tensor([[-1.2, -2.4], [-3.1, NAN]], dtype=torch.float64),
        mask=torch.tensor([[1, 1], [1, 0]]),
        event=torch.tensor([0, 0]),
        advantage=torch.tensor([2.0]),
        episode=torch.tensor([0]),
    )
    out, gradient = loss_and_gradient(batch, {"clip_low": 0.5, "clip_high": 0.5})
    assert out.log_ratio.tolist() == pytest.approx([0.28284271])
    assert out.ratio.tolist() == pytest.approx([1.32689671])
    assert out.clipped.tolist() == [False]
    assert float(out.loss) == pytest.approx(-2.65379341)
    assert gradient.flatten().tolist() == pytest.approx([-0.93825766, -0.93825766, -1.87651532, 0.0])


@pytest.mark.parametrize(
    ("set_norm", "length_norm", "log_ratio"),
    [  # K = 4 members of log-ratios (0.1, 0.3), (0.2,), (0.4,), (0.2,): means add to 1.0, sums to 1.2
        ("sqrt", "mean", 0.5),
        ("sum", "mean", 1.0),
        ("mean", "mean", 0.25),
        ("sqrt", "sum", 0.6),
        ("sum", "sum", 1.2),
        ("mean", "sum", 0.3),
    ],
)
def test_each_norm_gives_the_log_ratio_worked_out_by_hand(set_norm: str, length_norm: str, log_ratio: float) -> None:
    new = torch.tensor([[0.1, 0.3], [0.2, NAN], [0.4, NAN], [0.2, NAN]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 0]])
    batch = Batch(new, new * 0, mask, torch.zeros(4, dtype=torch.long), torch.ones(1), torch.zeros(1))
    out = loss_of(batch, {**CLIP, "set_norm": set_norm, "length_norm": length_norm})
    assert float(out.log_ratio) == pytest.approx(log_ratio)


@pytest.mark.parametrize(
    ("reduction", "loss"),
    [
        ("event", 1 / 3),  # -(1 + 2 - 4) / 3
        ("episode", 1.25),  # -((1 + 2) / 2 - 4) / 2
        ("member", -0.25),  # -(1 + 2 + 2 - 4) / 4
        ("token", 2 / 9),  # -(2 * 1 + 4 * 2 - 3 * 4) / 9
        ("constant", 0.05),  # -(2 * 1 + 4 * 2 - 3 * 4) / (4 * 10)
    ],
)
@pytest.mark.parametrize("level", ["set", "member", "token"])
def test_each_reduction_at_ratio_one_gives_the_loss_worked_out_by_hand(level: str, reduction: str, loss: float) -> None:
    out = loss_of(HAND, {**CLIP, "ratio_level": level, "reduction": reduction}, constant_length=10)
    assert float(out.loss) == pytest.approx(loss)


def test_token_weights_are_those_worked_out_by_hand() -> None:
    # episode: 1 / (N E_ep K n) = 1/8 each of 2, then 1/8, 1/24 each of 3, then 1/6 each of 3.
    weight = token_weights(HAND.mask, HAND.event, HAND.advantage, reduction="episode", episode=HAND.episode)
    assert weight.flatten().tolist() == pytest.approx(
        [1 / 8, 1 / 8, 0, 1 / 8, 0, 0, 1 / 24, 1 / 24, 1 / 24, 1 / 6, 1 / 6, 1 / 6]
    )


def test_a_trajectory_is_one_unit_with_one_clip_over_all_members_of_its_episode() -> None:
    # Episode 0 has events {0.3} and {0.1, 0.5}: K = 3, L = 0.9 / sqrt 3 = 0.51961524, rho = 1.68138058,
    # A = +1: clipped at 1.2. Episode 1 has one event {-0.2}: rho = 0.81873075, A = -2: not clipped.
    # "event": weights 2/3 and 1/3: loss = -(2 * 1.2 - 2 * 0.81873075) / 3 = -0.25417950.
    out, gradient = one_token(
        [0.3, 0.1, 0.5, -0.2],
        [0, 1, 1, 2],
        [1.0, 1.0, -2.0],
        ratio_level="trajectory",
        episode=torch.tensor([0, 0, 1]),
    )
    assert out.ratio.tolist() == pytest.approx([1.68138058, 0.81873075])
    assert out.clipped.tolist() == [True, False]
    assert float(out.loss) == pytest.approx(-0.25417950)
    assert gradient.flatten().tolist() == pytest.approx([0, 0, 0, 2 * 0.81873075 / 3])


def test_num_episodes_sizes_the_outputs_of_a_trajectory_loss() -> None:
    out, _ = one_token(
        [0.1, -0.1],
        [0, 1],
        [1.0, -1.0],
        ratio_level="trajectory",
        episode=torch.tensor([3, 1]),
        num_episodes=6,
    )
    assert out.counted.tolist() == [False, True, False, True, False, False]
    assert out.log_ratio.tolist() == pytest.approx([0, -0.1, 0, 0.1, 0, 0])
    assert out.advantage.tolist() == [0, -1, 0, 1, 0, 0]
    assert (int(out.counts.episodes), int(out.counts.events)) == (2, 2)


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "clipped"),
    [  # bounds 0.7 and 1.5, on the side that would go on gaining
        (1.6, 2.0, 3.0, True),
        (1.4, 2.0, 2.8, False),
        (0.6, 2.0, 1.2, False),
        (0.6, -2.0, -1.4, True),
        (0.8, -2.0, -1.6, False),
        (1.6, -2.0, -3.2, False),
        (1.6, 0.0, 0.0, False),
        (0.6, 0.0, 0.0, False),
    ],
)
def test_the_clip_binds_on_the_gaining_side_only(
    ratio: float, advantage: float, surrogate: float, clipped: bool
) -> None:
    out, gradient = one_token([math.log(ratio)], [0], [advantage], clip_low=0.3, clip_high=0.5)
    assert float(out.loss) == pytest.approx(-surrogate)
    assert out.clipped.tolist() == [clipped]
    assert float(gradient) == pytest.approx(0.0 if clipped else -ratio * advantage)


def test_a_clip_without_bounds_never_binds() -> None:
    out, _ = one_token([5.0, -5.0], [0, 1], [1.0, -1.0], clip_low=math.inf, clip_high=math.inf)
    assert not out.clipped.any()
    assert float(out.loss) == pytest.approx(-(math.exp(5) - math.exp(-5)) / 2)


def test_a_clip_of_zero_takes_every_gain_away() -> None:
    out, gradient = one_token([0.1, -0.1], [0, 1], [1.0, -1.0], clip_low=0.0, clip_high=0.0)
    assert out.clipped.tolist() == [True, True]
    assert float(out.loss) == 0.0
    assert not gradient.any()
    on_policy, gradient = one_token([0.0], [0], [1.0], clip_low=0.0, clip_high=0.0)
    assert not on_policy.clipped.any()
    assert gradient.tolist() == [[-1.0]]


@pytest.mark.parametrize("limit", [0.5, 80.0])
def test_the_limit_of_the_log_ratio_may_lie_anywhere_below_the_end_of_float32(limit: float) -> None:
    new = torch.tensor([[limit + 1]])
    event, one = torch.tensor([0]), torch.ones(1, 1)
    out = srpo_loss(new, new * 0, one, event, -one[0], **CLIP, max_log_ratio=limit)
    assert float(out.ratio) == pytest.approx(math.exp(limit), rel=1e-4)


def test_a_lower_clip_of_one_never_binds() -> None:
    out, _ = one_token([-50.0], [0], [-1.0], clip_low=1.0)
    assert not out.clipped.any()


def test_tokens_carry_a_ratio_and_a_clip_each_at_token_level() -> None:
    # Log-ratios 0.5 and -0.5 with A = 1: min(1.64872127, 1.2) = 1.2 and 0.60653066; mean 0.90326533.
    new = torch.tensor([[0.5, -0.5]])
    out = srpo_loss(
        new,
        new * 0,
        torch.ones(1, 2),
        torch.tensor([0]),
        torch.ones(1),
        **CLIP,
        ratio_level="token",
        reduction="token",
    )
    assert out.clipped.tolist() == [[True, False]]
    assert out.ratio.flatten().tolist() == pytest.approx([1.64872127, 0.60653066])
    assert float(out.loss) == pytest.approx(-0.90326533)


def test_outputs_describe_the_units_that_count() -> None:
    advantage = torch.tensor([1.0, NAN, -4.0], dtype=torch.float64)
    by_set = loss_of(HAND, CLIP, advantage=advantage)
    assert by_set.counted.tolist() == [True, False, True]
    assert by_set.advantage.tolist() == [1, 0, -4]
    assert by_set.ratio.tolist() == [1, 1, 1]
    assert by_set.set_size.tolist() == [1, 0, 1]
    assert [int(n) for n in by_set.counts] == [2, 2, 2, 5]
    by_member = loss_of(HAND, {**CLIP, "ratio_level": "member"}, advantage=advantage)
    assert by_member.counted.tolist() == [True, False, False, True]
    assert by_member.advantage.tolist() == [1, 0, 0, -4]
    by_token = loss_of(HAND, {**CLIP, "ratio_level": "token"}, advantage=advantage)
    assert by_token.counted.int().tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert by_token.advantage.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0], [-4, -4, -4]]
    assert by_token.set_size.tolist() == [1, 0, 1]


def test_only_the_loss_carries_a_gradient() -> None:
    new = HAND.new.clone().requires_grad_()
    for level in LEVELS:
        out = loss_of(replace(HAND, new=new), {**CLIP, "ratio_level": level})
        carriers = [name for name, value in out._asdict().items() if name != "counts"]
        assert [name for name in carriers if getattr(out, name).requires_grad] == ["loss"]


# ------------------------------------------------------------------------------ against the reference


@pytest.mark.parametrize(
    ("level", "set_norm", "length_norm", "reduction"),
    list(itertools.product(LEVELS, SET_NORMS, LENGTH_NORMS, REDUCTIONS)),
)
def test_every_combination_equals_the_reference(level: str, set_norm: str, length_norm: str, reduction: str) -> None:
    shape = [[[3, 1, 2], [1], [0, 2]], [[2, 2]], [[0], [4, 1, 3, 2]], [[1], [1, 1]]]
    chosen = {
        "ratio_level": level,
        "set_norm": set_norm,
        "length_norm": length_norm,
        "reduction": reduction,
        "clip_low": 0.3,
        "clip_high": 0.5,
        "constant_length": 7.0,
    }
    for seed, spread in ((1, 0.3), (2, 1.5)):
        batch = make_batch(shape, seed, spread=spread, by_episode=level == "trajectory")
        assert_equals_the_reference(batch, chosen)


@given(cases())
def test_random_batches_equal_the_reference(case: tuple[Batch, Settings]) -> None:
    assert_equals_the_reference(*case)


def assert_equals_the_reference(batch: Batch, chosen: Settings) -> None:
    out, gradient = loss_and_gradient(batch, chosen)
    loss, expected, units = reference.loss_and_gradient(
        batch.new.numpy(),
        batch.old.numpy(),
        batch.mask.numpy(),
        batch.event.numpy(),
        batch.advantage[batch.event].numpy(),
        batch.episode.numpy(),
        **chosen,
    )
    again = out._replace(loss=torch.tensor(loss, dtype=torch.float64))
    assert_same((out, gradient), (again, torch.tensor(expected)))
    assert int(out.counted.sum()) == len(units)
    for key, (log_ratio, ratio, clipped) in units.items():
        assert bool(out.counted[key])
        assert float(out.log_ratio[key]) == pytest.approx(log_ratio, rel=1e-10, abs=1e-12)
        assert float(out.ratio[key]) == pytest.approx(ratio, rel=1e-10)
        assert bool(out.clipped[key]) == clipped
        assert bool(out.ratio_clamped[key]) == (log_ratio > 20)


@given(cases(ratio_level="token"))
def test_the_loss_is_the_sum_of_weighted_token_surrogates(case: tuple[Batch, Settings]) -> None:
    batch, chosen = case
    out = loss_of(batch, chosen)
    names = ("reduction", "constant_length")
    weight = token_weights(
        batch.mask,
        batch.event,
        batch.advantage,
        episode=batch.episode,
        **{name: chosen[name] for name in names},
    )
    surrogate, _, _ = clipped_surrogate(
        out.log_ratio,
        out.advantage,
        clip_low=chosen["clip_low"],
        clip_high=chosen["clip_high"],
    )
    largest = float((out.ratio * out.advantage).abs().sum())
    assert float(out.loss) == pytest.approx(-float((weight * surrogate).sum()), abs=1e-10 * largest)
    if chosen["reduction"] != "constant" and out.counted.any():
        assert float(weight.sum()) == pytest.approx(1)


@given(cases(ratio_level="set", set_norm="sqrt", reduction="event"))
def test_the_srpo_loss_is_the_mean_over_events_of_one_clipped_surrogate(
    case: tuple[Batch, Settings],
) -> None:
    batch, chosen = case
    out = loss_of(batch, chosen)
    bounded = out.ratio.clamp(1 - chosen["clip_low"], 1 + chosen["clip_high"])
    smaller = torch.minimum(out.ratio * out.advantage, bounded.nan_to_num(posinf=9e9) * out.advantage)
    mean = float(smaller.sum()) / max(int(out.counts.events), 1)
    assert float(out.loss) == pytest.approx(-mean, rel=1e-9, abs=1e-9)


# ---------------------------------------------------------------------------------------- properties


@given(cases(), _seeds)
def test_the_order_of_members_changes_nothing(case: tuple[Batch, Settings], seed: int) -> None:
    batch, chosen = case
    order = shuffled(len(batch.event), seed)
    out, gradient = loss_and_gradient(batch, chosen)
    other, permuted = loss_and_gradient(batch.rows(order), chosen)
    assert_same((out, gradient[order]), (other, permuted))


@given(cases(), _seeds)
def test_the_order_of_events_and_episodes_changes_nothing(case: tuple[Batch, Settings], seed: int) -> None:
    batch, chosen = case
    events = shuffled(len(batch.advantage), seed)
    episodes = shuffled(int(batch.episode.max()) + 1, seed + 1)
    position = torch.argsort(events)
    renamed = replace(
        batch,
        event=position[batch.event],
        advantage=batch.advantage[events],
        episode=episodes[batch.episode[events]],
    )
    assert_same(loss_and_gradient(batch, chosen), loss_and_gradient(renamed, chosen))


@given(cases(), st.integers(0, 3), st.integers(0, 3), st.sampled_from([NAN, 0.0, 1e30, -math.inf]))
def test_padding_changes_nothing(case: tuple[Batch, Settings], left: int, right: int, filling: float) -> None:
    batch, chosen = case

    def pad(values: Tensor, filling: float) -> Tensor:
        return torch.nn.functional.pad(values, (left, right), value=filling)

    padded = replace(
        batch,
        new=pad(batch.new, filling),
        old=pad(batch.old, -filling),
        mask=pad(batch.mask, 0),
    )
    out, gradient = loss_and_gradient(batch, chosen)
    assert_same((out, pad(gradient, 0)), loss_and_gradient(padded, chosen))


@given(
    cases(),
    st.lists(st.integers(0, 2), min_size=MOST_EPISODES, max_size=MOST_EPISODES),
    st.booleans(),
)
def test_parts_with_global_counts_add_up_to_the_whole(
    case: tuple[Batch, Settings], part_of_episode: list[int], per_row: bool
) -> None:
    batch, chosen = case
    counts = count(batch.mask, batch.event, batch.advantage, episode=batch.episode)
    part_of_row = torch.tensor(part_of_episode)[batch.episode[batch.event]]
    whole = loss_and_gradient(batch, chosen)
    gradient = torch.full_like(batch.new, NAN)
    losses = []
    for part in range(3):
        rows = torch.nonzero(part_of_row == part).flatten()
        more: Settings = {"counts": counts}
        if per_row:
            row_advantage = batch.advantage[batch.event[rows]]
            more |= {"advantage": row_advantage, "num_events": len(batch.advantage)}
        out, gradient[rows] = loss_and_gradient(batch.rows(rows), chosen, **more)
        losses.append(out.loss)
    assert_same(whole, (whole[0]._replace(loss=torch.stack(losses).sum()), gradient))


@given(cases(), st.lists(st.integers(0, 2), min_size=MOST_EPISODES, max_size=MOST_EPISODES))
def test_counts_of_parts_add_up_field_by_field(case: tuple[Batch, Settings], part_of_episode: list[int]) -> None:
    batch, _ = case
    part_of_row = torch.tensor(part_of_episode)[batch.episode[batch.event]]
    parts = []
    for part in range(3):
        rows = batch.rows(torch.nonzero(part_of_row == part).flatten())
        parts.append(count(rows.mask, rows.event, rows.advantage, episode=rows.episode))
    whole = count(batch.mask, batch.event, batch.advantage, episode=batch.episode)
    assert Counts(*(sum(n) for n in zip(*parts, strict=True))) == whole


@given(cases())
def test_counts_may_be_plain_numbers(case: tuple[Batch, Settings]) -> None:
    batch, chosen = case
    counts = count(batch.mask, batch.event, batch.advantage, episode=batch.episode)
    doubled = Counts(*(2 * int(n) for n in counts))
    out, gradient = loss_and_gradient(batch, chosen)
    other, half = loss_and_gradient(batch, chosen, counts=doubled)
    assert_same((out, gradient), (other._replace(loss=2 * other.loss), 2 * half))
    assert other.counts == counts


@given(cases())
def test_one_advantage_per_row_equals_one_per_event(case: tuple[Batch, Settings]) -> None:
    batch, chosen = case
    per_row = loss_and_gradient(
        batch,
        chosen,
        advantage=batch.advantage[batch.event],
        num_events=len(batch.advantage),
    )
    assert_same(loss_and_gradient(batch, chosen), per_row)


@given(cases())
def test_an_unscored_event_counts_as_left_out(case: tuple[Batch, Settings]) -> None:
    batch, chosen = case
    scored = ~batch.advantage[batch.event].isnan()
    zeros = batch.advantage.nan_to_num(0.0)  # without rows it is in no count
    out, gradient = loss_and_gradient(batch, chosen)
    less, kept = loss_and_gradient(replace(batch.rows(scored), advantage=zeros), chosen)
    assert_same((out, gradient[scored]), (less, kept))
    assert not gradient[~scored].any()
    assert out.counts == less.counts


@given(cases())
def test_log_probs_of_an_unscored_event_may_be_anything(case: tuple[Batch, Settings]) -> None:
    batch, chosen = case
    scored = ~batch.advantage[batch.event].isnan().unsqueeze(1)
    poisoned = replace(batch, new=batch.new.where(scored, NAN), old=batch.old.where(scored, -NAN))
    assert_same(loss_and_gradient(batch, chosen), loss_and_gradient(poisoned, chosen))


@given(cases())
def test_an_empty_member_counts_as_left_out(case: tuple[Batch, Settings]) -> None:
    batch, chosen = case
    full = batch.mask.any(1)
    out, gradient = loss_and_gradient(batch, chosen)
    less, kept = loss_and_gradient(batch.rows(full), chosen)
    assert_same((out, gradient[full]), (less, kept))
    assert not gradient[~full].any()
    assert torch.equal(out.set_size, less.set_size)


@given(cases())
def test_zero_advantages_give_a_zero_loss_and_gradient(case: tuple[Batch, Settings]) -> None:
    batch, chosen = case
    out, gradient = loss_and_gradient(batch, chosen, advantage=batch.advantage * 0)
    assert float(out.loss) == 0
    assert not gradient.any()
    assert not out.clipped.any()


@given(cases())
def test_events_with_advantage_zero_count(case: tuple[Batch, Settings]) -> None:
    batch, _ = case
    with_zeros = batch.advantage.where(batch.advantage.isnan(), 0.0)
    assert count(batch.mask, batch.event, with_zeros) == count(batch.mask, batch.event, batch.advantage)


@given(cases(ratio_level="set", set_norm="sqrt", length_norm="mean", reduction="event"))
def test_sets_of_one_equal_the_sequence_level_ratio_of_gspo(case: tuple[Batch, Settings]) -> None:
    batch, chosen = case
    alone = replace(
        batch,
        event=torch.arange(len(batch.event)),
        advantage=batch.advantage[batch.event],
        episode=torch.arange(len(batch.event)),
    )
    out, gradient = loss_and_gradient(alone, chosen)

    leaf = batch.new.clone().requires_grad_()
    terms = []
    for row in torch.nonzero(batch.mask.any(1) & ~alone.advantage.isnan()).flatten().tolist():
        places, A = batch.mask[row] != 0, alone.advantage[row]
        ratio = (leaf[row, places] - batch.old[row, places]).mean().exp()
        bounded = ratio.clamp(max(0.0, 1 - chosen["clip_low"]), min(9e9, 1 + chosen["clip_high"]))
        terms.append(torch.minimum(ratio * A, bounded * A))
    loss = -torch.stack(terms).mean() if terms else 0.0 * leaf.nan_to_num().sum()
    (expected,) = torch.autograd.grad(loss, leaf)
    assert_same((out, gradient), (out._replace(loss=loss.detach()), expected.nan_to_num()))

    member = {**chosen, "ratio_level": "member", "reduction": "member"}
    assert_same((out, gradient), loss_and_gradient(batch, member))


@given(cases(ratio_level="set"))
def test_an_episode_of_one_event_makes_set_and_trajectory_equal(
    case: tuple[Batch, Settings],
) -> None:
    batch, chosen = case
    single = replace(batch, episode=torch.arange(len(batch.advantage)))
    trajectory = {**chosen, "ratio_level": "trajectory"}
    assert_same(loss_and_gradient(single, chosen), loss_and_gradient(single, trajectory))
    if chosen["reduction"] == "event":
        by_episode = {**chosen, "reduction": "episode"}
        assert_same(loss_and_gradient(single, chosen), loss_and_gradient(single, by_episode))


@given(cases())
def test_float32_agrees_with_float64(case: tuple[Batch, Settings]) -> None:
    batch, chosen = case
    short = replace(batch, new=batch.new.float(), old=batch.old.float())
    long = replace(batch, new=short.new.double(), old=short.old.double())
    out, gradient = loss_and_gradient(short, chosen)
    assert (out.loss.dtype, gradient.dtype) == (torch.float32, torch.float32)
    assert_same((out, gradient), loss_and_gradient(long, chosen), tolerance=1e-5)


@given(cases())
def test_bfloat16_log_probs_are_cast_up(case: tuple[Batch, Settings]) -> None:
    batch, chosen = case
    short = replace(batch, new=batch.new.bfloat16(), old=batch.old.bfloat16())
    assume(not near_a_bound(short, chosen))
    out, gradient = loss_and_gradient(short, chosen)
    exact = replace(batch, new=short.new.float(), old=short.old.float())
    other, expected = loss_and_gradient(exact, chosen)
    assert out.loss.dtype == torch.float32
    assert_same((out, gradient.float()), (other, expected.bfloat16().float()), tolerance=1e-6)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64])
def test_the_mask_may_be_of_any_dtype_and_non_zero_means_sampled(dtype: torch.dtype) -> None:
    batch = make_batch([[[2, 1], [3]]], 5, spread=0.3, by_episode=False)
    other = replace(batch, mask=(3 * batch.mask).to(dtype))
    assert_same(loss_and_gradient(batch, CLIP), loss_and_gradient(other, CLIP))


def test_the_event_index_may_be_of_any_integer_dtype() -> None:
    for level in LEVELS:
        chosen = {**CLIP, "ratio_level": level, "reduction": "episode"}
        for dtype in (torch.uint8, torch.int16, torch.int32):
            other = replace(HAND, event=HAND.event.to(dtype), episode=HAND.episode.to(dtype))
            assert_same(loss_and_gradient(HAND, chosen), loss_and_gradient(other, chosen))


def test_advantages_may_be_whole_numbers() -> None:
    whole = loss_and_gradient(HAND, CLIP, advantage=torch.tensor([1, 2, -4]))
    assert_same(loss_and_gradient(HAND, CLIP), whole)


def test_no_gradient_reaches_the_old_log_probs_or_the_advantages() -> None:
    new = HAND.new.clone().requires_grad_()
    advantage = HAND.advantage.clone().requires_grad_()
    for level in LEVELS:
        chosen = {**CLIP, "ratio_level": level}
        batch = replace(HAND, new=new, old=new, advantage=advantage)
        loss = loss_of(batch, chosen).loss
        gradient, none = torch.autograd.grad(loss, (new, advantage), allow_unused=True)
        assert none is None
        assert_same_gradient(gradient, loss_and_gradient(HAND, chosen)[1])


def test_a_batch_without_rows_gives_zero() -> None:
    nothing = HAND.rows(torch.tensor([], dtype=torch.int64))
    for level, reduction in itertools.product(LEVELS, REDUCTIONS):
        chosen = {**CLIP, "ratio_level": level, "reduction": reduction, "constant_length": 4}
        out, gradient = loss_and_gradient(nothing, chosen)
        assert (float(out.loss), gradient.shape) == (0.0, (0, 3))
        empty = replace(nothing, advantage=torch.zeros(0), episode=torch.zeros(0))
        out = loss_of(empty, chosen)
        assert (float(out.loss), out.ratio.numel(), out.set_size.numel()) == (0.0, 0, 0)


def test_a_nan_that_was_sampled_shows_in_the_loss() -> None:
    poisoned = replace(HAND, new=HAND.new.clone().index_fill_(0, torch.tensor([1]), NAN))
    assert loss_of(poisoned, CLIP).loss.isnan()


def test_the_leaf_gradient_in_micro_batches_equals_the_one_graph_gradient() -> None:
    batch = make_batch([[[3, 2, 4], [1]], [[2, 2], [4, 1]]], 3, spread=0.0, by_episode=True)
    batch = replace(batch, advantage=torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64))
    torch.manual_seed(0)
    features = torch.randn(*batch.new.shape, 5, dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()

    def logprobs(rows: slice) -> Tensor:
        return torch.nn.functional.logsigmoid(model(features[rows])).squeeze(-1)

    for level, reduction in itertools.product(LEVELS, REDUCTIONS):
        chosen: Settings = {"clip_low": 0.3, "clip_high": 0.4, "constant_length": 9}
        chosen |= {"ratio_level": level, "reduction": reduction}
        old = logprobs(slice(None)).detach()
        old = old + 0.2 * torch.randn_like(old)

        model.zero_grad()
        loss_of(replace(batch, new=logprobs(slice(None)), old=old), chosen).loss.backward()
        expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

        model.zero_grad()
        leaf = logprobs(slice(None)).detach()
        _, gradient = loss_and_gradient(replace(batch, new=leaf, old=old), chosen)
        for start, end in ((0, 1), (1, 5), (5, 8)):
            logprobs(slice(start, end)).backward(gradient[start:end])
        pieces = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert_same_gradient(expected, pieces)


def test_a_long_sum_in_float32_keeps_its_precision() -> None:
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(64, 4096, generator=generator)
    new = old + 0.01 * torch.randn(64, 4096, generator=generator)
    batch = Batch(
        new,
        old,
        torch.ones(64, 4096),
        torch.arange(64) // 16,
        torch.tensor([1.0, -1.0, 0.5, 2.0]),
        torch.zeros(4),
    )
    exact = replace(batch, new=new.double(), old=old.double())
    for level, length_norm in itertools.product(LEVELS[:3], LENGTH_NORMS):
        chosen = {**CLIP, "ratio_level": level, "length_norm": length_norm}
        assert_same(loss_and_gradient(batch, chosen), loss_and_gradient(exact, chosen), 1e-5)


# -------------------------------------------------------------------------------------- KL, entropy


@given(cases(), st.sampled_from(["k2", "k3"]))
def test_the_kl_penalty_is_the_weighted_sum_over_counted_tokens(case: tuple[Batch, Settings], kind: str) -> None:
    batch, chosen = case
    weight = token_weights(
        batch.mask,
        batch.event,
        batch.advantage,
        reduction=chosen["reduction"],
        constant_length=7.0,
        episode=batch.episode,
    )
    leaf = batch.new.clone().requires_grad_()
    penalty = kl_penalty(leaf, batch.old, weight, kind)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(penalty, leaf)
    total, slopes = 0.0, torch.zeros_like(batch.new)
    for i, t in torch.nonzero(weight).tolist():
        d = float(batch.old[i, t] - batch.new[i, t])
        total += float(weight[i, t]) * (d * d / 2 if kind == "k2" else math.exp(d) - d - 1)
        slopes[i, t] = float(weight[i, t]) * (-d if kind == "k2" else 1 - math.exp(d))
    assert float(penalty.detach()) == pytest.approx(total, rel=1e-8, abs=1e-12)
    assert torch.allclose(gradient, slopes, rtol=1e-8, atol=1e-12)


def test_k3_is_accurate_and_not_negative_for_tiny_differences() -> None:
    d = torch.logspace(-8, -1, 400)
    for sign in (1, -1):
        new = (sign * d).unsqueeze(0)
        k3 = kl_per_token(new, torch.zeros_like(new), torch.ones_like(new))
        assert bool((k3 >= 0).all())
        exact = torch.expm1(-new.double()) + new.double()
        assert torch.allclose(k3.double(), exact, rtol=1e-2, atol=1e-12)


def test_kl_of_a_token_that_the_policy_all_but_gave_up_stays_finite_and_without_gradient() -> None:
    new = torch.tensor([[-120.0, -math.inf]]).requires_grad_()
    for kind in ("k2", "k3"):
        weight = torch.ones(1, 2)
        penalty = kl_penalty(new, torch.zeros(1, 2), weight, kind)
        (gradient,) = torch.autograd.grad(penalty, new)
        assert penalty.isfinite()
        assert not gradient.any()


def test_kl_is_taken_to_a_constant_reference_in_the_penalty() -> None:
    ref = torch.tensor([[-2.0]]).requires_grad_()
    assert not kl_penalty(torch.tensor([[-1.0]]), ref, torch.ones(1, 1)).requires_grad


def test_kl_in_bfloat16_is_cast_up() -> None:
    new = torch.tensor([[-1.0]], dtype=torch.bfloat16)
    penalty = kl_penalty(new, new - 1, torch.ones(1, 1, dtype=torch.float64))
    assert penalty.dtype == torch.float32
    assert float(penalty) == pytest.approx(0.36788, abs=1e-5)


def test_entropy_passes_a_gradient_to_sampled_tokens_only() -> None:
    logprobs = torch.tensor([[-0.5, NAN]]).requires_grad_()
    (gradient,) = torch.autograd.grad(entropy_estimate(logprobs, torch.tensor([[1, 0]])).sum(), logprobs)
    assert gradient.tolist() == [[-1.0, 0.0]]


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"ratio_level": "sequence"}, "ratio_level: 'sequence' is not one of set, member"),
        ({"set_norm": "max"}, "set_norm: 'max' is not one of sqrt, sum, mean"),
        ({"ratio_level": "token", "set_norm": "max"}, "set_norm: 'max' is not one of"),
        ({"length_norm": "max"}, "length_norm: 'max' is not one of mean, sum"),
        ({"reduction": "batch"}, "reduction: 'batch' is not one of event, episode"),
        ({"clip_low": -0.1}, r"clip: \[-0.1, 0.2\] is not a range"),
        ({"clip_high": -0.1}, r"clip: \[0.2, -0.1\] is not a range"),
        ({"clip_high": NAN}, r"clip: \[0.2, nan\] is not a range"),
        ({"max_log_ratio": 0.0}, r"max_log_ratio: 0.0 is outside \(0, 80\]"),
        ({"max_log_ratio": 88.0}, r"max_log_ratio: 88.0 is outside \(0, 80\]"),
        ({"reduction": "constant"}, "constant_length: None"),
        ({"reduction": "constant", "constant_length": 0}, "constant_length: 0"),
        ({"reduction": "constant", "constant_length": math.inf}, "constant_length: inf"),
        ({"reduction": "episode", "episode": None}, "episode: None"),
        ({"ratio_level": "trajectory", "episode": None}, "episode: None"),
        ({"episode": torch.zeros(2)}, r"episode: shape \[2\] with 3 events"),
        ({"num_events": 3}, r"advantage: shape \[3\] with num_events=3 and 4 rows"),
        ({"advantage": torch.zeros(3, 1)}, r"advantage: shape \[3, 1\]"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(more: Settings, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        loss_of(HAND, {**CLIP, **more})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"old": HAND.old[:, :2]}, r"old_logprobs: shape \[4, 2\] beside log-probs of \[4, 3\]"),
        ({"mask": HAND.mask[:3]}, r"mask: shape \[3, 3\] beside log-probs of \[4, 3\]"),
        ({"event": HAND.event[:3]}, r"event: shape \[3\] beside a mask of \[4, 3\]"),
    ],
)
def test_a_wrong_shape_is_one_clear_line(more: dict[str, Tensor], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        loss_of(replace(HAND, **more), CLIP)


def test_log_probs_must_have_rows_and_columns() -> None:
    flat = torch.zeros(4)
    with pytest.raises(InvalidInput, match=r"mask: shape \[4\] beside log-probs of \[4\]"):
        entropy_estimate(flat, flat)
    with pytest.raises(InvalidInput, match=r"ref_logprobs: shape \[4\] beside log-probs of \[4\]"):
        kl_per_token(flat, flat, flat)
    with pytest.raises(InvalidInput, match=r"event: shape \[4\] beside a mask of \[4\]"):
        count(flat, flat.long(), flat)


def test_k1_is_no_penalty() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(InvalidInput, match="kind: 'k1' is not one of k2, k3"):
        kl_penalty(one, one, one, "k1")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="kind: 'k4' is not one of k1, k2, k3"):
        kl_per_token(one, one, one, "k4")  # type: ignore[arg-type]


def test_a_set_norm_is_checked_where_it_is_used() -> None:
    with pytest.raises(InvalidInput, match="set_norm"):
        set_log_ratio(torch.ones(1), torch.zeros(1).long(), torch.ones(1), "max")  # type: ignore[arg-type]


@pytest.mark.parametrize("module", [objective, weights, divergence])
def test_the_examples_in_the_docstrings_run(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


# --------------------------------------------------------------------- what went wrong in other places


def test_event_means_do_not_depend_on_how_rows_fall_into_micro_batches() -> None:
    """huggingface/trl#3021: event losses 1, 1, 1, 5 have the mean 2.0, not the mean of means 3.0."""
    loss = [-1.0, -1.0, -1.0, -5.0]
    whole, gradient = one_token([0.0] * 4, [0, 1, 2, 3], loss)
    first, first_gradient = one_token([0.0] * 3, [0, 1, 2], loss[:3], counts=whole.counts)
    second, second_gradient = one_token([0.0], [0], loss[3:], counts=whole.counts)
    assert float(whole.loss) == 2.0
    assert float(first.loss + second.loss) == 2.0
    assert_same_gradient(gradient, torch.cat([first_gradient, second_gradient]))


def test_token_means_do_not_depend_on_how_rows_fall_into_micro_batches() -> None:
    """huggingface/trl#3021: token losses 4, 4 and eight times 1 have the mean 1.6, not 2.5."""
    mask = torch.tensor([[1] * 2 + [0] * 6, [1] * 8])
    event, advantage, zeros = torch.tensor([0, 1]), torch.tensor([-4.0, -1.0]), torch.zeros(2, 8)
    for level in LEVELS[:3]:
        chosen: Settings = {**CLIP, "ratio_level": level, "reduction": "token"}
        whole = srpo_loss(zeros, zeros, mask, event, advantage, **chosen)
        assert float(whole.loss) == pytest.approx(1.6)
        parts = [
            srpo_loss(zeros[i], zeros[i], mask[i], event[i], advantage, **chosen, counts=whole.counts)
            for i in (slice(0, 1), slice(1, 2))
        ]
        assert float(parts[0].loss + parts[1].loss) == pytest.approx(1.6)


@pytest.mark.parametrize("length_norm", LENGTH_NORMS)
def test_an_on_policy_group_has_loss_zero_whatever_the_lengths(length_norm: str) -> None:
    """huggingface/trl#2995: length enters through the log-ratio, never through an event's weight."""
    mask = torch.tensor([[1] * 2 + [0] * 6, [1] * 8])
    batch = Batch(
        torch.full((2, 8), -0.7),
        torch.full((2, 8), -0.7),
        mask,
        torch.tensor([0, 1]),
        torch.tensor([1.0, -1.0]),
        torch.tensor([0, 1]),
    )
    out, gradient = loss_and_gradient(batch, {**CLIP, "length_norm": length_norm})
    assert float(out.loss) == 0.0
    assert gradient.any()
    pooled = loss_of(batch, {**CLIP, "ratio_level": "token", "reduction": "token"})
    assert float(pooled.loss) == pytest.approx(0.6)


@pytest.mark.parametrize("masked", [70.0, NAN, math.inf])
@pytest.mark.parametrize("level", LEVELS)
def test_a_masked_position_has_neither_value_nor_gradient(level: str, masked: float) -> None:
    """alibaba/ROLL#444: two sampled tokens of loss 2 have the mean 2, whatever the others hold."""
    batch = Batch(
        torch.tensor([[0.0, masked], [0.0, -masked]]),
        torch.zeros(2, 2),
        torch.tensor([[1, 0], [1, 0]]),
        torch.tensor([0, 1]),
        torch.tensor([-2.0, -2.0]),
        torch.tensor([0, 1]),
    )
    out, gradient = loss_and_gradient(batch, {**CLIP, "ratio_level": level, "reduction": "token"})
    assert float(out.loss) == 2.0
    assert gradient.tolist() == [[1.0, 0.0], [1.0, 0.0]]


def test_a_set_has_one_ratio_and_one_clip_whatever_its_members_do() -> None:
    """NovaSky-AI/SkyRL#1278: members that cancel leave ratio 1; members that agree are clipped once."""
    cancelling, _ = one_token([0.5, -0.5], [0, 0], [1.0])
    assert float(cancelling.ratio) == 1.0
    assert float(cancelling.loss) == pytest.approx(-1.0)
    alone, _ = one_token([0.5, -0.5], [0, 0], [1.0], ratio_level="member", reduction="member")
    assert float(alone.loss) == pytest.approx(-0.903265)

    agreeing, gradient = one_token([0.25, 0.25], [0, 0], [1.0])
    assert agreeing.ratio.tolist() == pytest.approx([1.4241], abs=1e-4)  # exp(0.5 / sqrt 2)
    assert agreeing.clipped.tolist() == [True]
    assert float(agreeing.loss) == pytest.approx(-1.2)
    assert not gradient.any()


@pytest.mark.parametrize("K", [1, 2, 4])
def test_the_gradient_of_a_set_has_the_same_norm_for_every_size(K: int) -> None:
    """facebookresearch/BenchMARL#255: each member's gradient is -A / sqrt K, their norm |A|."""
    _, gradient = one_token([0.0] * K, [0] * K, [1.0])
    assert gradient.flatten().tolist() == pytest.approx([-1 / math.sqrt(K)] * K)
    assert float(gradient.norm()) == pytest.approx(1.0)


def test_the_set_size_counts_members_and_not_the_padded_width() -> None:
    """facebookresearch/BenchMARL#255: one member beside two rows of padding has ratio exp(0.3)."""
    new = torch.tensor([[0.3], [NAN], [0.0]])
    out = srpo_loss(
        new,
        torch.zeros(3, 1),
        torch.tensor([[1], [0], [0]]),
        torch.zeros(3).long(),
        torch.ones(1),
        clip_low=0.2,
        clip_high=0.5,
    )
    assert out.ratio.tolist() == pytest.approx([1.3499], abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("advantage", "loss"), [(1.0, -1.2), (-1.0, math.exp(20)), (0.0, 0.0)])
def test_a_huge_log_ratio_gives_a_finite_loss_and_no_gradient(
    advantage: float, loss: float, dtype: torch.dtype
) -> None:
    """OpenRLHF/OpenRLHF#1293: four members of log-ratio 60 have a set log-ratio of 120."""
    batch = Batch(
        torch.full((4, 1), 60.0, dtype=dtype),
        torch.zeros(4, 1, dtype=dtype),
        torch.ones(4, 1),
        torch.zeros(4).long(),
        torch.tensor([advantage]),
        torch.zeros(1),
    )
    out, gradient = loss_and_gradient(batch, CLIP)
    assert out.log_ratio.tolist() == [120.0]
    assert out.ratio_clamped.tolist() == [True]
    assert out.ratio.isfinite().all()
    assert float(out.loss) == pytest.approx(loss)
    assert not gradient.any()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("log_ratio", [120.0, -120.0, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_no_log_ratio_overflows_at_any_level(level: str, log_ratio: float, advantage: float) -> None:
    """OpenRLHF/OpenRLHF#1293: also where nothing is clipped and at the ends of the number line."""
    out, gradient = one_token(
        [log_ratio, 0.0],
        [0, 1],
        [advantage, advantage],
        ratio_level=level,
        episode=torch.tensor([0, 1]),
        clip_low=math.inf,
        clip_high=math.inf,
    )
    assert out.loss.isfinite()
    assert gradient.isfinite().all()
    assert float(gradient[0]) == pytest.approx(0.0, abs=1e-40)


def test_the_ratio_has_a_gradient_up_to_its_limit_and_none_beyond() -> None:
    for log_ratio, inside in ((2.9, True), (3.0, True), (3.1, False)):
        out, gradient = one_token([log_ratio], [0], [-1.0], max_log_ratio=3.0)
        assert bool(gradient.any()) is inside
        assert out.ratio_clamped.tolist() == [not inside]
        assert float(out.ratio) == pytest.approx(math.exp(min(log_ratio, 3.0)))


def test_the_clip_fraction_counts_the_side_that_binds() -> None:
    """huggingface/trl#3175: ratios 1.5, 1.4, 1.3 with A = +1, +1, -1: two of three, all high."""
    ratios = [math.log(r) for r in (1.5, 1.4, 1.3)]
    out, _ = one_token(ratios, [0, 1, 2], [1.0, 1.0, -1.0])
    assert out.clipped.tolist() == [True, True, False]
    assert (out.clipped & (out.advantage > 0)).tolist() == [True, True, False]
    assert not (out.clipped & (out.advantage < 0)).any()


def test_an_event_of_three_members_is_clipped_once() -> None:
    """huggingface/trl#3175: the clip fraction is over sets, and A = 0 is never clipped."""
    out, _ = one_token([0.5] * 3 + [-0.5, 0.9], [0, 0, 0, 1, 2], [1.0, -1.0, 0.0])
    assert out.clipped.tolist() == [True, True, False]
    assert (out.counted & (out.advantage != 0)).tolist() == [True, True, False]
    assert (out.clipped & (out.advantage < 0)).tolist() == [False, True, False]


def test_the_kl_penalty_pulls_towards_the_reference() -> None:
    """mll-lab-nu/RAGEN#58: added to a loss that is minimised, it lowers a log-prob that is too high."""
    new = torch.tensor([[-1.0]]).requires_grad_()
    ref, one = torch.tensor([[-2.0]]), torch.ones(1, 1)
    event, advantage = torch.tensor([0]), torch.tensor([0.0])
    weight = token_weights(one, event, advantage)
    out = srpo_loss(new, new.detach(), one, event, advantage, **CLIP)
    loss = out.loss + 0.1 * kl_penalty(new, ref, weight)
    (gradient,) = torch.autograd.grad(loss, new)
    assert float(loss.detach()) == pytest.approx(0.036788, abs=1e-6)
    assert float(gradient) > 0  # a descent step lowers the log-prob
    new = new.detach()
    assert float(kl_per_token(new, ref, one, "k1")) == pytest.approx(1.0)
    assert float(kl_per_token(new, ref, one)) == pytest.approx(0.36788, abs=1e-5)
    assert float(kl_per_token(ref, new, one)) == pytest.approx(0.71828, abs=1e-5)


@pytest.mark.parametrize("padding", [1, 8])
def test_entropy_and_kl_do_not_see_padding(padding: int) -> None:
    """huggingface/trl#6121: padding that carries +1.0 once made an entropy negative."""
    logprobs = torch.tensor([[-0.5, -1.5] + [1.0] * padding])
    mask = torch.tensor([[1, 1] + [0] * padding])
    assert entropy_estimate(logprobs, mask).tolist() == [2.0]
    assert float(entropy_estimate(logprobs, mask).sum() / mask.sum()) == 1.0
    kl = kl_per_token(logprobs, torch.zeros_like(logprobs), mask)
    assert float(kl[0, 2:].sum()) == 0.0
    assert float(kl.sum()) == pytest.approx(math.exp(0.5) - 1.5 + math.exp(1.5) - 2.5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("length_norm", LENGTH_NORMS)
def test_a_batch_without_a_sampled_token_has_loss_and_gradient_zero(
    level: str, reduction: str, length_norm: str
) -> None:
    """verl-project/verl#785: 0 / 0 must not reach the parameters."""
    batch = replace(HAND, mask=HAND.mask * 0, new=HAND.new * NAN)
    chosen = {**CLIP, "ratio_level": level, "reduction": reduction, "length_norm": length_norm}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, gradient = loss_and_gradient(batch, chosen, constant_length=5)
    assert float(out.loss) == 0.0
    assert not gradient.any()
    assert not out.counted.any()
    assert [int(n) for n in out.counts] == [0, 0, 0, 0]
    weight = token_weights(batch.mask, batch.event, batch.advantage)
    assert float(kl_penalty(batch.new, batch.old, weight)) == 0.0
    assert entropy_estimate(batch.new, batch.mask).tolist() == [0.0] * 4


def test_an_empty_member_has_log_ratio_zero_and_does_not_count_in_the_set_size() -> None:
    """verl-project/verl#785: beside an empty output, a member of log-ratio 0.1 is a set of one."""
    batch = Batch(
        torch.tensor([[0.1, 0.1], [NAN, NAN]]),
        torch.zeros(2, 2),
        torch.tensor([[1, 1], [0, 0]]),
        torch.tensor([0, 0]),
        torch.tensor([1.0]),
        torch.tensor([0]),
    )
    out = loss_of(batch, CLIP)
    assert out.log_ratio.tolist() == pytest.approx([0.1])
    assert out.set_size.tolist() == [1]
    alone = loss_of(batch, {**CLIP, "ratio_level": "member"})
    assert alone.log_ratio.tolist() == pytest.approx([0.1, 0.0])
    assert alone.counted.tolist() == [True, False]


@pytest.mark.parametrize("level", LEVELS)
def test_text_of_tools_gets_no_gradient_at_the_logits(level: str) -> None:
    """mll-lab-nu/RAGEN#71: four tokens of a call, five of its result, three of an answer."""
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1]])
    torch.manual_seed(0)
    logits = torch.randn(1, 12, 20, requires_grad=True)
    ids = torch.arange(1, 13).unsqueeze(0)
    logprobs = logits.log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2)
    out = srpo_loss(
        logprobs,
        logprobs.detach(),
        mask,
        torch.tensor([0]),
        torch.ones(1),
        **CLIP,
        ratio_level=level,  # type: ignore[arg-type]
        episode=torch.tensor([0]),
    )
    out.loss.backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum(2).bool().int().tolist() == mask.tolist()
    assert int(out.counts.tokens) == 7
