"""How do rows with common beginnings pass through a model as one? As a trie of tokens, each computed once.

A token's state depends on the tokens before it alone, so rows share the states of their longest common beginning. The
tokens of all rows lie in one sequence without padding; each attends to its path alone.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from srpo_env.trie_attention import attend, block_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("srpo_env")

_ATTENTION = "sdpa_or_trie"
# Attention scores, a quarter more aside, that padding may add to a call to save another call.
_CALL = 2048
# Tokens that the rows of a pass may hold, for each that it may compute.
_PATHS = 16


class Branches(NamedTuple):
    """Ends of rows that attend in one call.

    Attributes:
        own: [b, q] the places of the tokens that no row before has, padded.
        path: [b, k] the places of each row's tokens from its first to its last, padded.
        present: [b, q] False where `own` is padding.
        visible: [b, 1, q, k] whether a token sees one of its path; None where each branch is a whole row.
    """

    own: Tensor
    path: Tensor
    present: Tensor
    visible: Tensor | None


class Trie:
    """The tokens of some rows, each common beginning once.

    Args:
        ids: [r, t] tokens; rows share most in lexicographic order.
        length: [r] how many of a row's tokens count.
        device: Where the model is.

    Attributes:
        ids: [n] tokens, each right before those that follow it in any row: in preorder.
        position: [n] their positions in the rows.
        place: [r, t] where a row's tokens lie among the n.
    """

    def __init__(self, ids: Tensor, length: Tensor, device: torch.device) -> None:
        start = common(ids, length)
        own = length - start
        step = torch.arange(ids.shape[1])
        place = step - start.unsqueeze(1) + (own.cumsum(0) - own).unsqueeze(1)
        for row, shared in enumerate(start.tolist()):
            place[row, :shared] = place[row - 1, :shared]
        mine = (step >= start.unsqueeze(1)) & (step < length.unsqueeze(1))
        self.ids = ids[mine].to(device)
        self.position = step.expand_as(ids)[mine].to(device)
        self.place = place.to(device)
        self._rows = place, start, length

    @cached_property
    def branches(self) -> list[Branches]:
        """Ends of rows, those of about one shape together."""
        place, start, length = self._rows
        own = length - start
        order = torch.argsort(start * (place.shape[1] + 1) + own)  # branches of one shape are neighbours
        order = order[own[order] > 0]  # the others are the beginning of the row before them
        return [_branches(place, start, length, part, self.ids.device) for part in _alike(start, length, order)]

    @cached_property
    def order(self) -> Tensor:
        """[n] where each token lies among the own tokens of the branches, one branch after the other."""
        return torch.cat([branch.own[branch.present] for branch in self.branches]).argsort()

    @cached_property
    def end(self) -> Tensor:
        """[n] the first place behind each token and all that follow it in any row."""
        place, _, length = self._rows
        present = torch.arange(place.shape[1]) < length.unsqueeze(1)
        last = place.gather(1, length.unsqueeze(1) - 1).expand_as(place)
        end = torch.zeros(len(self.ids), dtype=torch.int64)
        return end.scatter_reduce(0, place[present], last[present] + 1, "amax").to(self.ids.device)

    @cached_property
    def blocks(self) -> Any:
        """Which blocks of tokens see which, for FlexAttention."""
        return block_mask(self.end)

    def inputs(self) -> dict[str, Any]:
        """What a model that `can_share` is called with to compute the tokens; their states are [1, n, ...]."""
        return {
            "input_ids": self.ids.unsqueeze(0),
            "position_ids": self.position.unsqueeze(0),
            # Nobody reads it: it keeps the model from making an [n, n] mask.
            "attention_mask": self.ids.new_ones(1, 1, 1, 1, dtype=torch.bool),
            "trie": self,
        }


@torch.no_grad()
def can_share(model: PreTrainedModel) -> bool:
    """Whether a model can be called with a trie, and gives the states of whole rows; tried out on three short rows.

    From then on its attention is sdpa in a call without a trie and the trie's own in a call with one. Nothing is
    switched back and forth, so threads that call the model don't mind each other.

    Args:
        model: A causal language model; a warning names it where it can't.
    """
    if not _attends_to_all(model):
        return False
    ids = torch.arange(3 * 16).reshape(3, 16) % model.config.get_text_config().vocab_size
    ids[1, :9] = ids[0, :9]
    length = torch.tensor([16, 14, 5])
    at = tuple(each.to(model.device) for each in torch.nonzero(torch.arange(16) < length.unsqueeze(1)).T)
    try:
        _let_attend(model)
        trie = Trie(ids, length, model.device)
        found = model.base_model(**trie.inputs(), use_cache=False).last_hidden_state[0, trie.place[at]]
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        reason = f"{type(error).__name__}: {error}"
    else:
        expected = model.base_model(**whole(ids, length, model.device), use_cache=False).last_hidden_state[at]
        largest = float((found - expected).abs().max())
        tolerance = 1e-4 if expected.dtype in (torch.float32, torch.float64) else 5e-2
        if largest <= tolerance * float(expected.abs().max()):
            return True
        reason = f"hidden states differ by up to {largest:.2g}"
    logger.warning("%s can't share common beginnings (%s); each row is computed whole", type(model).__name__, reason)
    return False


def passes(ids: Tensor, length: Tensor, most_tokens: int, *, share: bool) -> list[Tensor]:
    """Cuts rows into passes through the model; every row is in exactly one.

    Args:
        ids: [r, t] tokens of rows with different contents.
        length: [r] how many of a row's tokens count.
        most_tokens: Most tokens that a pass of several rows computes, padding included; together its rows hold 16 times
            as many at most, since attention may gather the keys and values of all.
        share: Whether rows share the tokens of a common beginning; else each is padded to the longest of its pass.

    Returns:
        Rows of each pass: where they share, in lexicographic order, else by length.
    """
    if share:
        digits = ids.numpy().astype(">i8")  # bytes sort as the numbers do
        contents = [row[:n].tobytes() for row, n in zip(digits, length.tolist(), strict=True)]
        order = torch.tensor(sorted(range(len(ids)), key=contents.__getitem__), dtype=torch.int64)
    else:
        order = length.argsort(stable=True)
    length = length[order]
    shared = common(ids[order], length) if share else torch.zeros_like(length)
    ends, cost, number, paths = [], 0, 0, 0
    for at, (n, same) in enumerate(zip(length.tolist(), shared.tolist(), strict=True)):
        number, paths = number + 1, paths + n
        cost = cost + n - same if share else n * number
        if number > 1 and (cost > most_tokens or paths > _PATHS * most_tokens):
            ends.append(at)
            cost, number, paths = n, 1, n
    return list(order.tensor_split(ends)) if len(order) else []


def whole(ids: Tensor, length: Tensor, device: torch.device) -> dict[str, Any]:
    """What a model is called with to compute rows whole, padded on the right."""
    width = int(length.max())
    present = torch.arange(width) < length.unsqueeze(1)
    return {
        "input_ids": ids[:, :width].to(device),
        "attention_mask": None if bool(present.all()) else present.long().to(device),
    }


def common(ids: Tensor, length: Tensor) -> Tensor:
    """[r] how many of a row's first tokens are those of the row before it."""
    same = (ids[1:] == ids[:-1]).to(torch.uint8).cumprod(1).sum(1)
    shared = torch.minimum(same, torch.minimum(length[1:], length[:-1]))
    return torch.cat([torch.zeros_like(length[:1]), shared])


def _alike(start: Tensor, length: Tensor, order: Tensor) -> tuple[Tensor, ...]:
    """Cuts rows, in order, into branches that padding to one shape makes little larger."""
    ends, number, needed, longest, widest, roots = [], 0, 0, 0, 0, True
    for at, (s, n) in enumerate(zip(start[order].tolist(), length[order].tolist(), strict=True)):
        number, needed = number + 1, needed + (n - s) * n
        longest, widest = max(longest, n - s), max(widest, n)
        if number > 1 and (number * longest * widest > 1.25 * needed + _CALL or roots != (s == 0)):
            ends.append(at)
            number, needed, longest, widest = 1, (n - s) * n, n - s, n
        roots = s == 0
    return order.tensor_split(ends)


def _branches(place: Tensor, start: Tensor, length: Tensor, rows: Tensor, device: torch.device) -> Branches:
    at, start, length = place[rows], start[rows].unsqueeze(1), length[rows].unsqueeze(1)
    position = torch.arange(int((length - start).max())) + start
    width = int(length.max())
    step = torch.arange(width)
    present = position < length
    own = at.gather(1, torch.where(present, position, start))
    path = torch.where(step < length, at[:, :width], at[:, :1])
    visible = None if bool((start == 0).all()) else (step <= position.unsqueeze(2)).unsqueeze(1).to(device)
    return Branches(own.to(device), path.to(device), present.to(device), visible)


def _attends_to_all(model: PreTrainedModel) -> bool:
    """Whether every layer sees all earlier tokens: a trie has no windows."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return getattr(config, "sliding_window", None) is None
    return all(kind == "full_attention" for kind in kinds)


def _let_attend(model: PreTrainedModel) -> None:
    attention = model.config._attn_implementation  # noqa: SLF001 (its public name can't be read)
    if attention == "sdpa":
        model.set_attn_implementation(_ATTENTION)
    elif attention != _ATTENTION:
        raise NotImplementedError(f"its attention is {attention!r}, not 'sdpa'")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, trie: Trie | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    if trie is None:
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)
    return attend(trie, query, key, value, kwargs.get("scaling")), None


AttentionInterface.register(_ATTENTION, _attention)
AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
