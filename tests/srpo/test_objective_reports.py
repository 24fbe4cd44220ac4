"""Does what went wrong in other packages go right here? Each case names its report."""

import math
import warnings
from dataclasses import replace

import pytest
import torch

from srpo_env.trainers.srpo.divergence import entropy_estimate, kl_penalty
from srpo_env.trainers.srpo.objective import (
    srpo_loss,
)
from srpo_env.trainers.srpo.weights import token_weights
from tests.srpo.loss_cases import (
    CLIP,
    HAND,
    LENGTH_NORMS,
    LEVELS,
    NAN,
    REDUCTIONS,
    Batch,
    Settings,
    assert_same_gradient,
    loss_and_gradient,
    loss_of,
    one_token,
)


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
