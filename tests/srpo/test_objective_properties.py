"""What changes the loss, and what must not? Properties on random mini-batches, types and shapes."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from srpo_env.trainers.srpo.weights import Counts, count
from tests.srpo.loss_cases import (
    CLIP,
    HAND,
    LENGTH_NORMS,
    LEVELS,
    MOST_EPISODES,
    NAN,
    REDUCTIONS,
    Batch,
    Settings,
    assert_same,
    assert_same_gradient,
    cases,
    loss_and_gradient,
    loss_of,
    make_batch,
    near_a_bound,
    seeds,
    shuffled,
)


@given(cases(), seeds)
def test_the_order_of_members_changes_nothing(case: tuple[Batch, Settings], seed: int) -> None:
    batch, chosen = case
    order = shuffled(len(batch.event), seed)
    out, gradient = loss_and_gradient(batch, chosen)
    other, permuted = loss_and_gradient(batch.rows(order), chosen)
    assert_same((out, gradient[order]), (other, permuted))


@given(cases(), seeds)
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
