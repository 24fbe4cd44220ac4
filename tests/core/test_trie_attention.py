"""Does a token of a trie see its path and nothing else, by either way, and is a wrong or slow way left out?"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from srpo_env import trie_attention
from srpo_env.token_trie import Trie
from srpo_env.trie_attention import Choice, attend, gathered

SCALE = 0.3


def trie_of(rows: Sequence[Sequence[int]]) -> Trie:
    rows = sorted(map(list, rows))
    length = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(length.max()), dtype=torch.int64)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    return Trie(ids, length, torch.device("cpu"))


def random_rows(seed: int, number: int = 12, most: int = 12) -> list[list[int]]:
    """Of two tokens, so that they part anywhere and some are beginnings of others."""
    draw = random.Random(seed)
    rows = {tuple(draw.randrange(2) for _ in range(draw.randint(1, most))) for _ in range(draw.randint(1, number))}
    return [list(row) for row in rows]


def long_rows(seed: int = 0) -> list[list[int]]:
    """Some hundred tokens: a head, prompts after it, and outputs of different lengths."""
    draw = random.Random(seed)
    some = lambda n: [draw.randrange(50) for _ in range(n)]  # noqa: E731
    head = some(140)
    prompts = [head + some(draw.randint(1, 150)) for _ in range(4)]
    return [prompt + some(draw.randint(1, 60)) for prompt in prompts for _ in range(5)]


def heads(trie: Trie, dtype: torch.dtype = torch.float64, keys: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of four heads, keys and values of fewer."""
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, number, len(trie.ids), 8, generator=made).to(dtype) for number in (4, keys, keys))
    return q, k, v


def seen(trie: Trie) -> Tensor:
    """[n, n] the mask that FlexAttention is given."""
    place = torch.arange(len(trie.ids))
    found: Tensor = trie.blocks.mask_mod(None, None, place.unsqueeze(1), place)
    return found


def dense(trie: Trie, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attention over all tokens under that mask."""
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen(trie), scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2)


def whole(trie: Trie, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attention of each token over its path alone, which is read off the rows."""
    out = torch.zeros(1, query.shape[2], query.shape[1], value.shape[3], dtype=value.dtype)
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    _, _, length = trie._rows
    for row, n in enumerate(length.tolist()):
        for t in range(n):
            path = trie.place[row, : t + 1]
            scores = torch.einsum("hd,hkd->hk", query[0, :, path[-1]], key[0, :, path]) * scale
            got = torch.einsum("hk,hkd->hd", scores.softmax(1), value[0, :, path])
            out = out.index_put((torch.tensor(0), path[-1]), got)
    return out


def with_gradients(way: Callable[..., Tensor], trie: Trie, given: Sequence[Tensor]) -> list[Tensor]:
    leaves = [each.clone().requires_grad_() for each in given]
    out = way(trie, *leaves, SCALE)
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


# ------------------------------------------------------------------------------------------ the mask


def test_tokens_lie_in_preorder_and_see_their_beginnings() -> None:
    """Rows 1 2 3, 1 2 4 and 5: both 3 and 4 see 1 and 2, and not each other; 5 sees itself."""
    trie = trie_of([[5], [1, 2, 4], [1, 2, 3]])
    assert trie.ids.tolist() == [1, 2, 3, 4, 5]
    assert trie.position.tolist() == [0, 1, 2, 2, 0]
    assert trie.end.tolist() == [4, 4, 3, 4, 5]
    assert seen(trie).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]


@given(st.integers(0, 2**31))
def test_a_token_sees_the_tokens_of_its_row_up_to_itself_and_no_others(seed: int) -> None:
    trie = trie_of(random_rows(seed))
    expected = torch.zeros(len(trie.ids), len(trie.ids), dtype=torch.bool)
    _, _, length = trie._rows
    for row, n in enumerate(length.tolist()):
        for t in range(n):
            expected[trie.place[row, t], trie.place[row, : t + 1]] = True
    assert torch.equal(seen(trie), expected)


@pytest.mark.parametrize("seed", range(5))
def test_the_blocks_are_those_that_torch_finds_by_looking_at_every_pair(seed: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    trie = trie_of(long_rows(seed))
    n = len(trie.ids)
    assert n > 4 * 128
    expected = create_block_mask(trie.blocks.mask_mod, 1, 1, n, n, device="cpu")
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(trie.blocks, name), getattr(expected, name)), name
    assert int(expected.full_kv_num_blocks.sum()) > 0


@given(st.integers(0, 2**31), st.sampled_from([1, 2, 4]))
def test_gathering_and_the_mask_give_the_results_and_gradients_of_whole_rows(seed: int, keys: int) -> None:
    trie = trie_of(random_rows(seed, 6, 6))
    given = heads(trie, keys=keys)
    expected = with_gradients(whole, trie, given)
    for way in (gathered, dense):
        for found, theirs in zip(with_gradients(way, trie, given), expected, strict=True):
            assert torch.allclose(found, theirs, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_flex_attention_compiled_for_a_cpu_gives_what_gathering_gives() -> None:
    """It compiles for a minute, and has no gradients there."""
    for seed in range(3):
        trie = trie_of(long_rows(seed))
        given = heads(trie, torch.float32)
        with torch.no_grad():
            found, expected = (way(trie, *given, SCALE) for way in (trie_attention.masked, gathered))
        assert torch.allclose(found, expected, atol=1e-5)


# ---------------------------------------------------------------------------------------- the choice


class Clock:
    """Says that the first way it times takes one second and the next takes `other`."""

    def __init__(self, other: float) -> None:
        self.other, self.timed = other, 0

    def __call__(self, run: Callable[[], object], device: torch.device) -> float:
        run()
        self.timed += 1
        return 1.0 if self.timed % 2 else self.other


class Counted:
    """A way that counts its calls."""

    def __init__(self, way: Callable[..., Tensor]) -> None:
        self.way, self.calls = way, 0

    def __call__(self, *given: Any) -> Tensor:
        self.calls += 1
        return self.way(*given)


@pytest.mark.parametrize(("seconds", "kept"), [(0.5, "FlexAttention"), (2.0, "gathering")])
def test_the_faster_way_is_kept_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture, seconds: float, kept: str
) -> None:
    masked, clock = Counted(dense), Clock(seconds)
    choice, trie = Choice(masked, clock), trie_of(random_rows(1))
    given = (trie, *heads(trie), SCALE)
    with caplog.at_level(logging.INFO, "srpo_env"):
        choice(*given)
        tried = masked.calls
        for _ in range(3):
            assert torch.allclose(choice(*given), gathered(*given), atol=1e-12)
    assert masked.calls - tried == (3 if kept == "FlexAttention" else 0)
    (line,) = caplog.messages
    assert f"(float64, forward and backward): {1000 * seconds:g} ms by FlexAttention, 1000 ms by gathering" in line
    assert line.endswith(f"take {kept}")


def test_each_kind_of_trie_is_tried_once() -> None:
    clock = Clock(0.5)
    choice = Choice(dense, clock)
    small, large = trie_of([[1, 2, 3], [1, 2, 4]]), trie_of([[1, 2, 3, 4], [1, 2, 4, 5]])
    for _ in range(2):
        for trie in (small, large):  # 4 and 6 tokens
            choice(trie, *heads(trie), SCALE)
    assert clock.timed == 2
    larger = trie_of([range(8)])
    choice(larger, *heads(larger), SCALE)
    choice(small, *heads(small, torch.float32), SCALE)
    choice(small, *heads(small, keys=1), SCALE)
    with torch.no_grad():
        choice(small, *heads(small), SCALE)
    assert clock.timed == 10


def test_without_gradients_none_are_tried(caplog: pytest.LogCaptureFixture) -> None:
    trie = trie_of(random_rows(1))
    with torch.inference_mode(), caplog.at_level(logging.INFO, "srpo_env"):
        Choice(dense, Clock(0.5))(trie, *heads(trie), SCALE)
    assert "(float64, forward): " in caplog.text


def blind(trie: Trie, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Sees all earlier tokens, of whichever row."""
    return nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    ).transpose(1, 2)


def lossy(trie: Trie, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Right, but for a hundredth of the gradient of the keys."""
    return dense(trie, query, key.detach() * 0.01 + key * 0.99, value, scale)


def endless(*given: Any) -> Tensor:
    return dense(*given) * torch.nan


def broken(*_: Any) -> Tensor:
    raise NotImplementedError("no kernel")


@pytest.mark.parametrize(
    ("way", "why"),
    [
        (blind, "its output differs by up to "),
        (lossy, "its gradient by keys differs by up to "),
        (endless, "its output differs by up to nan"),
        (broken, "NotImplementedError: no kernel"),
    ],
)
def test_a_way_that_is_wrong_or_fails_is_never_taken_and_told_of_once(
    caplog: pytest.LogCaptureFixture, way: Any, why: str
) -> None:
    clock = Clock(0.0)
    choice = Choice(way, clock)
    for rows in ([[1, 2, 3], [1, 2, 4]], [[1, 2, 3], [1, 2, 4]], [range(9), range(1, 9)]):
        trie = trie_of(rows)
        given = (trie, *heads(trie), SCALE)
        assert torch.equal(choice(*given), gathered(*given))
    assert clock.timed == 0
    (line,) = caplog.messages
    assert line.startswith(f"FlexAttention can't attend along tries ({why}")


def test_a_way_that_fails_later_is_left_then(caplog: pytest.LogCaptureFixture) -> None:
    way = Counted(dense)
    choice, trie = Choice(way, Clock(0.5)), trie_of(random_rows(1))
    given = (trie, *heads(trie), SCALE)
    choice(*given)
    way.way = broken
    for _ in range(2):
        assert torch.equal(choice(*given), gathered(*given))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_no_difference(caplog: pytest.LogCaptureFixture, dtype: torch.dtype) -> None:
    clock, trie = Clock(0.5), trie_of(long_rows())
    choice = Choice(dense, clock)
    choice(trie, *heads(trie, dtype), SCALE)
    assert clock.timed == 2
    assert not caplog.messages


class Typed(Counted):
    """Notes the types that a way gets and gives."""

    def __call__(self, *given: Any) -> Tensor:
        out = super().__call__(*given)
        self.types = [*getattr(self, "types", []), {each.dtype for each in (*given[1:4], out)}]
        return out


@pytest.mark.parametrize("autocast", [False, True])
def test_a_way_computes_in_the_type_of_autocast_and_is_judged_in_float32(
    monkeypatch: pytest.MonkeyPatch, autocast: bool
) -> None:
    trie = trie_of(random_rows(1))
    query, key, value = heads(trie, torch.float32 if autocast else torch.bfloat16)
    judge, way = Typed(gathered), Typed(dense)
    monkeypatch.setattr(trie_attention, "gathered", judge)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        Choice(way, Clock(0.5))(trie, query, key, value.bfloat16(), SCALE)
    assert judge.types[0] == {torch.float32}
    assert all(each == {torch.bfloat16} for each in way.types)


@pytest.mark.parametrize(
    ("device", "tokens", "tried"), [("cpu", 512, False), ("cuda", 511, False), ("cuda", 512, True)]
)
def test_only_long_tries_on_cuda_are_tried(
    monkeypatch: pytest.MonkeyPatch, device: str, tokens: int, tried: bool
) -> None:
    ways = {False: Counted(lambda *_: torch.zeros(1)), True: Counted(lambda *_: torch.ones(1))}
    monkeypatch.setattr(trie_attention, "gathered", ways[False])
    monkeypatch.setattr(trie_attention, "_choice", lambda: ways[True])
    query: Any = SimpleNamespace(device=torch.device(device), shape=(1, 4, tokens, 8))
    assert bool(attend(SimpleNamespace(), query, query, query, None)) is tried  # type: ignore[arg-type]
