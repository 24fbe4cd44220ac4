"""How does a token of a trie see its path? By gathering keys and values, or by a mask over all of them.

    token i sees token j  iff  j <= i < end_j          where tokens lie in preorder, j's descendants up to end_j

Gathering works everywhere. On CUDA the mask is FlexAttention's, which gathers nothing and skips what is hidden. The
first trie of each kind is computed both ways; the mask is taken where its results are right and come sooner.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from srpo_env.token_trie import Trie

logger = logging.getLogger("srpo_env")

Attend = Callable[["Trie", Tensor, Tensor, Tensor, float | None], Tensor]
"""Gives [1, n, heads, d], what each token gets from its path, of [1, heads, n, d]; keys may have fewer heads."""

# Tokens below which compiling can't pay.
_FEWEST = 512
# Tokens that FlexAttention skips together.
_BLOCK = 128
# Largest differences from gathering in float32, relative to the largest entry.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4, torch.float64: 1e-8}


def attend(trie: Trie, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attends by the way that is right and fastest on this device; see `Attend`."""
    way = _choice() if query.device.type == "cuda" and query.shape[2] >= _FEWEST else gathered
    return way(trie, query, key, value, scale)


def gathered(trie: Trie, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Gathers the path of each branch; branches of one shape attend in one call."""
    found = []
    for own, path, present, visible in trie.branches:
        out = nn.functional.scaled_dot_product_attention(
            query[0, :, own].transpose(0, 1),
            key[0, :, path].transpose(0, 1),
            value[0, :, path].transpose(0, 1),
            attn_mask=visible,
            is_causal=visible is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        found.append(out.transpose(1, 2)[present])
    return torch.cat(found).index_select(0, trie.order).unsqueeze(0)


def masked(trie: Trie, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attends by FlexAttention, compiled when it is first called."""
    out: Tensor = _flex_attention()(
        query, key, value, block_mask=trie.blocks, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2)


def block_mask(end: Tensor) -> Any:
    """The mask as FlexAttention reads it: which blocks of keys a block of queries sees in part, and which whole.

    Args:
        end: [n] the first place behind each token's descendants; tokens lie in preorder.
    """
    from torch.nn.attention.flex_attention import BlockMask  # takes seconds

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    n = len(end)
    number = -(-n // _BLOCK)
    block = torch.arange(number, device=end.device)
    first = block * _BLOCK
    ends = nn.functional.pad(end, (0, number * _BLOCK - n)).view(number, _BLOCK)
    before = block < block.unsqueeze(1)  # [queries, keys]
    whole = before & (ends.amin(1) >= (first + _BLOCK).unsqueeze(1))
    part = (block <= block.unsqueeze(1)) & (ends.amax(1) > first.unsqueeze(1)) & ~whole
    return BlockMask.from_kv_blocks(*_listed(part), *_listed(whole), _BLOCK, visible, seq_lengths=(n, n))


def _listed(seen: Tensor) -> tuple[Tensor, Tensor]:
    """[1, 1, q] how many blocks of keys each block of queries sees, and [1, 1, q, k] which, those first."""
    order = seen.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return seen.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def _seconds_on(run: Callable[[], object], device: torch.device) -> float:
    """Mean time of three runs on a CUDA device, after one that may compile."""
    run()
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(3):
        run()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / 3


class Choice:
    """The way that each kind of trie takes: a size up to the next power of 2, a shape and type, with gradients or not.

    Once the mask's results are wrong, or there are none, no kind takes it any more.

    Args:
        masked: The way that has to prove itself.
        seconds: How long something takes on a device.
    """

    def __init__(
        self,
        masked: Attend,
        seconds: Callable[[Callable[[], object], torch.device], float] = _seconds_on,
    ) -> None:
        self._masked = masked
        self._seconds = seconds
        self._kept: dict[object, Attend] = {}
        self._refused = False

    def __call__(self, trie: Trie, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """See `Attend`."""
        device = query.device.type
        if torch.is_autocast_enabled(device):  # gathering does so by itself
            query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
        given = (trie, query, key, value, scale)
        if self._refused:
            return gathered(*given)
        size = query.shape[2].bit_length()
        kind = (query.device, query.dtype, query.shape[1::2], key.shape[1], size, torch.is_grad_enabled())
        try:
            if kind not in self._kept:
                self._kept[kind] = self._tried(*given)
            if self._kept[kind] is not gathered:
                return self._masked(*given)
        except Exception as error:  # noqa: BLE001 (a compiler's errors are of any type)
            self._refuse(f"{type(error).__name__}: {error}")
        return gathered(*given)

    def _tried(self, trie: Trie, *given: Any) -> Attend:
        """The way that this kind of trie takes from now on."""
        query, scale = given[0], given[-1]
        # Exact, since gathering adds up a shared key's gradient in the inputs' own precision.
        exact = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in given[:-1])
        with torch.autocast(query.device.type, enabled=False):
            expected = _results(gathered, trie, *exact, scale)
        for name, found in _results(self._masked, trie, *given).items():
            largest, difference = float(expected[name].abs().max()), float((found - expected[name]).abs().max())
            if not difference <= _TOLERANCE[query.dtype] * largest:  # NaN is not
                self._refuse(f"its {name} differs by up to {difference:.2g} where the largest is {largest:.2g}")
                return gathered
        seconds = {
            way: self._seconds(partial(_results, way, trie, *given), query.device) for way in (gathered, self._masked)
        }
        kept = min(seconds, key=seconds.__getitem__)
        logger.info(
            "attention of tries of %d tokens (%s, %s): %.4g ms by FlexAttention, %.4g ms by gathering; "
            "those of up to %d tokens take %s",
            query.shape[2],
            str(query.dtype).removeprefix("torch."),
            "forward and backward" if torch.is_grad_enabled() else "forward",
            1000 * seconds[self._masked],
            1000 * seconds[gathered],
            2 ** query.shape[2].bit_length() - 1,
            "gathering" if kept is gathered else "FlexAttention",
        )
        return kept

    def _refuse(self, reason: str) -> None:
        self._refused = True
        logger.warning("FlexAttention can't attend along tries (%s); keys and values are gathered instead", reason)


def _results(way: Attend, trie: Trie, *given: Any) -> dict[str, Tensor]:
    """What a way gives and, where gradients are on, the gradients of half its squared norm."""
    if not torch.is_grad_enabled():
        return {"output": way(trie, *given)}
    leaves = [each.detach().requires_grad_() for each in given[:-1]]
    inputs: tuple[Any, ...] = (*leaves, given[-1])
    output = way(trie, *inputs)
    gradients = torch.autograd.grad(output, leaves, output.detach())
    names = ("gradient by queries", "gradient by keys", "gradient by values")
    return {"output": output.detach(), **dict(zip(names, gradients, strict=True))}


@cache
def _choice() -> Choice:
    """What this process found out."""
    return Choice(masked)


@cache
def _flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention  # takes seconds

    # Whole: in parts it would make the [n, n] scores that it is there to avoid.
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return compiled
