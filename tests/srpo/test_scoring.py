"""Are the log-probs those of a plain forward pass of each row, however rows are cut, shared and padded?"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from srpo_env.batch import EventBatch
from srpo_env.records import Sampling
from srpo_env.trainers.srpo.pieces import cut, distinct
from srpo_env.trainers.srpo.scoring import Scorer, as_grid


def sampled(batch: EventBatch) -> Tensor:
    return torch.nonzero(batch.mask.any(1)).flatten()


def scores(scorer: Scorer, batch: EventBatch) -> tuple[Tensor, Tensor]:
    """[M, T] log-probs and entropies."""
    dtype = torch.promote_types(scorer.model.dtype, torch.float32)
    with torch.no_grad():
        return as_grid(scorer.score(batch, sampled(batch), entropy=True), batch.mask.shape, dtype)


def worst(scorer: Scorer, batch: EventBatch, plain: Any) -> float:
    """Largest difference to the plain forward pass of each row."""
    with torch.no_grad():
        expected = plain.logprobs(scorer.model, batch, range(batch.num_members))
    return float((scores(scorer, batch)[0] - expected).abs().max())


class Table(nn.Module):
    """Gives the logits at each position that it was made with, whatever the tokens."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)
        self.config = SimpleNamespace(get_text_config=SimpleNamespace)
        self.device = torch.device("cpu")
        self.dtype = logits.dtype

    def get_output_embeddings(self) -> None:
        return None

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False
    ) -> SimpleNamespace:
        logits = self.logits[: input_ids.shape[1]]
        return SimpleNamespace(logits=logits.expand(len(input_ids), *logits.shape))


def one_row(make: Any, output: list[int], prompt: list[int], **values: Any) -> EventBatch:
    return EventBatch.from_events([make.event([make.member(output, prompt, **values)])])


# --------------------------------------------------------------------------------- against one by one


@pytest.mark.parametrize("shared", [True, False], ids=["shared prompts", "own prompts"])
@pytest.mark.parametrize("tokens", [1, 17, 60, 10**6])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_each_row_alone(
    make: Any, plain: Any, shared: bool, tokens: int, temperature: float
) -> None:  # B033
    batch = make.batch(1, groups=3, shared_prompts=shared, temperature=temperature)
    assert worst(Scorer(make.gpt2().eval(), tokens), batch, plain) < 1e-12
    assert worst(Scorer(make.qwen3().eval(), tokens), batch, plain) < 1e-5


def test_prompts_of_3_and_7_tokens_in_one_pass_are_scored_as_alone(make: Any, plain: Any) -> None:  # B033
    rows = [make.member([1, 2, 3], range(3)), make.member([4], range(7)), make.member([5, 6], range(7))]
    batch = EventBatch.from_events([make.event(rows)])
    scorer = Scorer(make.gpt2().eval())
    assert worst(scorer, batch, plain) < 1e-12
    (piece,) = scorer.pieces(batch, sampled(batch))
    assert len(piece) == 3


def test_entropies_are_those_of_the_tempered_distribution(make: Any) -> None:
    batch = make.batch(2, temperature=0.6)
    model = make.gpt2().eval()
    _, entropy = scores(Scorer(model, 40), batch)
    for row in sampled(batch).tolist():
        ids = batch.ids[row : row + 1, : int(batch.length[row])]
        p = torch.softmax(model(ids).logits[0] / batch.temperature[row], dim=-1)
        expected = -(p * p.log()).sum(-1)
        places = torch.nonzero(batch.mask[row]).flatten()
        assert torch.allclose(entropy[row, places], expected[places - 1], atol=1e-12)
    assert float(entropy[~batch.mask].abs().max()) == 0


def test_a_token_is_predicted_by_the_position_before_it(make: Any) -> None:  # B031
    ids = [11, 12, 21, 22, 23, 2]
    logits = torch.full((6, 30), -1e4)
    for place, following in enumerate(ids[1:]):
        logits[place, following] = 0.0
    batch = one_row(make, ids[2:], ids[:2])
    logprobs, entropy = scores(Scorer(Table(logits)), batch)  # type: ignore[arg-type]
    assert logprobs.tolist() == [[0] * 6]
    assert entropy.tolist() == [[0] * 6]
    assert int(batch.mask.sum()) == 4


def test_the_temperature_of_the_row_divides_the_logits(make: Any) -> None:  # B024
    batch = one_row(make, [0] * 20, [1], sampling=Sampling(temperature=0.5))
    logprobs, _ = scores(Scorer(Table(torch.tensor([[2.0, 0.0]]).repeat(21, 1))), batch)  # type: ignore[arg-type]
    assert float(logprobs[0, 1:].mean()) == pytest.approx(-0.01815, abs=1e-5)


def test_bf16_logits_go_through_a_float32_softmax(make: Any) -> None:  # B026
    logits = torch.tensor([[2.0, 1.9, 0.0]], dtype=torch.bfloat16).repeat(4, 1)
    logprobs, _ = scores(Scorer(Table(logits)), one_row(make, [0, 1, 2], [0]))  # type: ignore[arg-type]
    assert logprobs[0, 1:].tolist() == pytest.approx(torch.log_softmax(logits[0].float(), dim=0).tolist(), abs=1e-6)
    assert logprobs[0, 1:].tolist() == pytest.approx([-0.7130, -0.8130, -2.7130], abs=6e-3)


def test_a_thousand_bf16_tokens_add_up_to_no_ratio(make: Any) -> None:  # B026
    """A log-softmax in bf16 is off by 0.006 a token: e^6 for this member."""
    logits = torch.tensor([[2.0, 1.9, 0.0]], dtype=torch.bfloat16)
    batch = one_row(make, [0] * 1000, [0])
    logprobs, _ = scores(Scorer(Table(logits.repeat(1001, 1))), batch)  # type: ignore[arg-type]
    exact = float(torch.log_softmax(logits[0].double(), dim=0)[0])
    assert float(logprobs.double().sum()) == pytest.approx(1000 * exact, abs=1e-3)


def test_bf16_autocast_keeps_float32_log_probs(make: Any, plain: Any) -> None:
    scorer = Scorer(make.qwen3().eval(), autocast="bfloat16")
    assert worst(scorer, make.batch(1), plain) < 0.3
    with torch.no_grad():
        batch = make.batch(1)
        assert all(part.logprobs.dtype == torch.float32 for part in scorer.score(batch, sampled(batch)))


def tool_rows(make: Any, prompt: list[int] | None = None) -> EventBatch:
    """Two rows: sampled (ids 1 to 4), tool text (5 to 9), sampled again (10 to 12)."""
    rows = [make.member([*range(1, 12), last], prompt or [0]) for last in (12, 13)]
    batch = EventBatch.from_events([make.event(rows)])
    start = len(prompt or [0])
    mask = batch.mask.clone()
    mask[:, start + 4 : start + 9] = False
    return replace(batch, mask=mask)


def test_only_positions_that_predict_sampled_tokens_get_a_gradient(make: Any) -> None:  # B034
    model = Table(torch.zeros(13, 30))
    (part,) = Scorer(model).score(tool_rows(make), torch.arange(2))  # type: ignore[arg-type]
    part.logprobs.sum().backward()
    assert model.logits.grad is not None
    moved = (model.logits.grad != 0).any(1).int().tolist()  # at t it predicts id t + 1
    assert moved == [1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0]


def test_tool_text_between_sampled_tokens_is_read_and_not_scored(make: Any, plain: Any) -> None:  # B034
    batch = tool_rows(make, [20, 21, 22])
    scorer = Scorer(make.gpt2().eval())
    assert worst(scorer, batch, plain) < 1e-12
    assert float(scores(scorer, batch)[0][~batch.mask].abs().max()) == 0


# -------------------------------------------------------------------------------------- self-checks


@pytest.mark.parametrize("kind", ["scaled", "capped"])
def test_a_head_that_does_more_than_multiply_is_called_whole(make: Any, plain: Any, kind: str) -> None:
    model = make.gpt2().eval()
    if kind == "capped":  # so small that a cap at 30 changes little
        model.transformer.ln_f.weight.data.mul_(0.02)
        model.transformer.ln_f.bias.data.zero_()
    forward = model.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = out.logits * 0.5 if kind == "scaled" else 30 * torch.tanh(out.logits / 30)
        return out

    model.forward = changed
    scorer = Scorer(model, 40)
    assert worst(scorer, make.batch(1), plain) < 1e-12
    assert_whole(scorer, make.batch(1), 40)


@pytest.mark.parametrize("fault", ["no trie", "own positions"])
def test_a_model_that_cannot_read_a_trie_is_given_whole_rows(
    make: Any, plain: Any, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    model = make.gpt2().eval()
    forward = model.transformer.forward
    dropped = {"no trie": "trie", "own positions": "position_ids"}[fault]

    def lacking(*args: Any, **given: Any) -> Any:
        return forward(*args, **{name: value for name, value in given.items() if name != dropped})

    model.transformer.forward = lacking
    batch = make.batch(1, groups=3)
    scorer = Scorer(model, 60)
    assert worst(scorer, batch, plain) < 1e-12
    assert "GPT2LMHeadModel can't share common beginnings" in caplog.text
    assert len(caplog.records) == 1
    assert_whole(scorer, batch, 60)


def test_a_first_batch_that_shares_nothing_tells_too(make: Any, plain: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = make.gpt2().eval()
    model.set_attn_implementation = lambda _: None  # so it sees all tokens before one, of whichever row
    scorer = Scorer(model)
    scores(scorer, one_row(make, [1, 2, 3], [4, 5]))
    assert "GPT2LMHeadModel can't share common beginnings" in caplog.text
    assert worst(scorer, make.batch(1), plain) < 1e-12


def test_layers_with_a_window_are_given_whole_rows(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A trie has no windows, and rows shorter than one don't tell."""
    model = make.qwen3(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert_whole(Scorer(model.eval(), 60), make.batch(1), 60)
    assert not caplog.records


def test_without_a_trie_the_model_attends_as_ever(make: Any, tmp_path: Path) -> None:
    model, untouched = make.gpt2().eval(), make.gpt2().eval()
    scores(Scorer(model), make.batch(1))
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    padding = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    for mask in (None, padding):
        assert torch.equal(model(ids, attention_mask=mask).logits, untouched(ids, attention_mask=mask).logits)
    model.save_pretrained(tmp_path)
    assert "attn_implementation" not in (tmp_path / "config.json").read_text(encoding="utf-8")


def test_another_thread_may_call_the_model_in_the_middle_of_a_pass(make: Any) -> None:
    model, batch, ids = make.gpt2().eval(), make.batch(1, groups=3), torch.tensor([[1, 2, 3, 4]])
    expected = model(ids).logits
    undisturbed = scores(Scorer(model), batch)
    found: list[Tensor] = []

    def call(*_: Any) -> None:
        handle.remove()
        with ThreadPoolExecutor(1) as threads:
            found.append(threads.submit(lambda: model(ids).logits).result())

    scorer = Scorer(model)
    scorer.pieces(batch, sampled(batch))  # the self-checks
    handle = model.transformer.h[1].register_forward_pre_hook(call)
    disturbed = scores(scorer, batch)
    assert torch.equal(found[0], expected)
    assert torch.equal(disturbed[0], undisturbed[0])


# --------------------------------------------------------------------------------- what is computed


def reads(batch: EventBatch, rows: Tensor) -> list[tuple[int, ...]]:
    """The tokens of each row that stand before its last sampled one."""
    ends = [int(torch.nonzero(mask).max()) for mask in batch.mask[rows]]
    return [tuple(ids[:end]) for ids, end in zip(batch.ids[rows].tolist(), ends, strict=True)]


def beginnings(rows: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {row[:end] for row in rows for end in range(1, len(row) + 1)}


def assert_whole(scorer: Scorer, batch: EventBatch, most: int) -> None:
    """Micro-batches keep to a budget that counts rows whole, padded to the longest."""
    for piece in scorer.pieces(batch, distinct(batch, sampled(batch))[0]):
        assert len(piece) == 1 or max(map(len, reads(batch, piece))) * len(piece) <= most


@settings(max_examples=100)
@given(st.integers(0, 2**31), st.integers(1, 200), st.booleans(), st.booleans())
def test_pieces_hold_every_row_once_and_keep_to_the_budget(
    make: Any, seed: int, tokens: int, shared: bool, by: bool
) -> None:
    batch = make.batch(seed, groups=seed % 3 + 1, shared_prompts=shared)
    rows, _ = distinct(batch, sampled(batch))
    pieces = cut(batch, rows, tokens, share=by)
    assert sorted(torch.cat(pieces).tolist()) == sorted(rows.tolist())
    for piece in pieces:
        held = reads(batch, piece)
        cost = len(beginnings(held)) if by else max(map(len, held)) * len(held)
        assert len(piece) == 1 or cost <= tokens


def test_a_piece_takes_what_fits(make: Any) -> None:
    rows = [make.member([i, 1], [2, 3, 4]) for i in range(4)]  # 3 + n tokens, without the last
    batch = EventBatch.from_events([make.event(rows)])
    sizes = [[len(piece) for piece in cut(batch, torch.arange(4), n, share=True)] for n in (1, 5, 6, 7)]
    assert sizes == [[1, 1, 1, 1], [2, 2], [3, 1], [4]]


def test_a_long_beginning_of_many_rows_does_not_gather_without_bound(make: Any) -> None:
    """The model reads 51 tokens of each row. 32 rows hold 16 times 102 tokens, though they are 97 once shared."""
    rows = [make.member([i % 30, 1 + i // 30, 2], range(49)) for i in range(60)]
    batch = EventBatch.from_events([make.event(rows)])
    assert [len(piece) for piece in cut(batch, torch.arange(60), 102, share=True)] == [32, 28]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31))
def test_rows_with_any_common_beginning_get_the_gradient_of_whole_rows(make: Any, plain: Any, seed: int) -> None:
    """Two token ids: rows part anywhere, are prefixes of others, have tool text in the middle."""
    draw = random.Random(seed)
    few = lambda most: [draw.randrange(2) for _ in range(draw.randint(1, most))]  # noqa: E731
    rows = [
        make.member(few(12), few(6), sampling=Sampling(temperature=draw.choice([0.5, 1.0])))
        for _ in range(draw.randint(1, 12))
    ]
    batch = EventBatch.from_events([make.event(rows)])
    hidden = torch.tensor([[draw.random() < 0.3 for _ in range(batch.mask.shape[1])] for _ in rows])
    batch = replace(batch, mask=batch.mask & ~hidden)
    weights = torch.tensor([[draw.gauss(0, 1) for _ in row] for row in batch.mask.tolist()], dtype=torch.float64)
    budget = draw.choice([1, 20, 10**6])
    found = []
    for shared in (True, False):
        model = make.gpt2().eval()
        if shared:
            scorer = Scorer(model, budget)
            for part in scorer.score(batch, sampled(batch)):
                (part.logprobs * weights[part.rows, : part.logprobs.shape[1]]).sum().backward()
        else:
            (plain.logprobs(model, batch, range(len(rows))) * weights).sum().backward()
        grads = [each.grad for each in model.parameters() if each.grad is not None]
        found.append(torch.cat([each.flatten() for each in grads]) if grads else torch.zeros(1))
    assert float((found[0] - found[1]).norm()) <= 1e-10 * float(found[1].norm())


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31))
def test_each_common_beginning_is_computed_once(make: Any, seed: int) -> None:
    draw = random.Random(seed)
    rows = [
        make.member([draw.randrange(2) for _ in range(draw.randint(1, 9))], [draw.randrange(2)])
        for _ in range(draw.randint(1, 12))
    ]
    batch = EventBatch.from_events([make.event(rows)])
    scorer = Scorer(make.gpt2().eval())
    scores(scorer, batch)  # with the self-checks
    watched = Watched(scorer.model)
    scores(scorer, batch)
    assert watched.tokens == len(beginnings(reads(batch, torch.arange(len(rows)))))


def test_turns_of_a_chat_that_grows_are_one_row(make: Any) -> None:
    turns = [make.member([5, 6], [1, 2, 3]), make.member([8, 9], [1, 2, 3, 5, 6, 7])]
    batch = EventBatch.from_events([make.event(turns)])
    scorer = Scorer(make.gpt2().eval())
    scores(scorer, batch)
    watched = Watched(scorer.model)
    scores(scorer, batch)
    assert watched.tokens == 7  # 1 2 3 5 6 7 8


class Watched:
    """Counts what the body and the head of a GPT-2 compute."""

    def __init__(self, model: Any) -> None:
        self.model, self.tokens, self.predicted = model, 0, 0
        model.transformer.wte.register_forward_hook(lambda _, args, __: self._add(tokens=args[0].numel()))
        model.lm_head.register_forward_hook(lambda _, args, __: self._add(predicted=args[0][..., 0].numel()))

    def _add(self, tokens: int = 0, predicted: int = 0) -> None:
        self.tokens += tokens
        self.predicted += predicted


def test_prompts_pass_once_and_never_reach_the_head(make: Any) -> None:
    prompt = list(range(20))
    rows = [make.member([i, 5], prompt) for i in range(6)]
    batch = EventBatch.from_events([make.event(rows)])
    scorer = Scorer(make.gpt2().eval())
    scores(scorer, batch)  # with the self-checks
    watched = Watched(scorer.model)
    scores(scorer, batch)
    assert watched.tokens == 20 + 6  # the last token is predicted and not read
    assert watched.predicted == 12


def test_equal_rows_are_computed_once_and_all_get_their_share_of_the_gradient(make: Any) -> None:
    rows = [
        make.member([7, 8]),
        make.member([7, 8]),
        make.member([7, 9]),
        make.member([7, 8], sampling=Sampling(temperature=0.5)),
    ]
    batch = EventBatch.from_events([make.event(rows)])
    first, same = distinct(batch, torch.arange(4))
    assert (first.tolist(), same.tolist()) == ([0, 2, 3], [0, 0, 2, 3])
    found = []
    for weights in ([1.0, 1.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]):
        model = make.gpt2().eval()
        for part in Scorer(model).score(batch, torch.arange(4)):
            (part.logprobs.sum(1) * torch.tensor(weights)[part.rows]).sum().backward()
        found.append(model.lm_head.weight.grad)
    assert torch.allclose(*found, atol=1e-12)


def test_rows_that_differ_in_their_mask_are_not_equal(make: Any) -> None:
    batch = EventBatch.from_events([make.event([make.member([7, 8]), make.member([7, 8])])])
    mask = batch.mask.clone()
    mask[1, 2] = False
    first, _ = distinct(replace(batch, mask=mask), torch.arange(2))
    assert first.tolist() == [0, 1]
