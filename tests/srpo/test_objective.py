"""Is the loss the one of the contract? Hand-worked numbers, and a NumPy reference.

The numbers are worked out in the comments; `reference.py` says everything again in plain loops.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given

from srpo_env.trainers.srpo.objective import (
    clipped_surrogate,
    srpo_loss,
)
from srpo_env.trainers.srpo.weights import token_weights
from tests.srpo import reference
from tests.srpo.loss_cases import (
    CLIP,
    HAND,
    LENGTH_NORMS,
    LEVELS,
    NAN,
    REDUCTIONS,
    SET_NORMS,
    Batch,
    Settings,
    assert_same,
    cases,
    loss_and_gradient,
    loss_of,
    make_batch,
    one_token,
)

# ----------------------------------------------------------------------------- worked out by hand


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
