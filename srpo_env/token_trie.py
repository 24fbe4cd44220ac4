"""How do rows with common beginnings pass through a model as one? As a trie of tokens, each computed once.

A token's state depends on the tokens before it alone, so rows share the states of their longest common beginning. The
tokens of all rows lie in one sequence without padding; attention gathers each row's path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "srpo_trie"
# Attention scores, a quarter more aside, that padding may add to a call to save another call.
_CALL = 2048


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
        ids: [n] tokens.
        position: [n] their positions in the rows.
        place: [r, t] where a row's tokens lie among the n.
    """

    def __init__(self, ids: Tensor, length: Tensor, device: torch.device) -> None:
        start = common(ids, length)
        own = length - start
        order = torch.argsort(start * (ids.shape[1] + 1) + own)  # branches of one shape are neighbours
        first = torch.empty_like(length)
        first[order] = own[order].cumsum(0) - own[order]
        step = torch.arange(ids.shape[1])
        place = first.unsqueeze(1) + step - start.unsqueeze(1)
        for row, shared in enumerate(start.tolist()):
            place[row, :shared] = place[row - 1, :shared]
        mine = (step >= start.unsqueeze(1)) & (step < length.unsqueeze(1))
        at = place[mine].argsort()
        self.ids = ids[mine][at].to(device)
        self.position = step.expand_as(ids)[mine][at].to(device)
        self.place = place.to(device)
        order = order[own[order] > 0]  # the others are the beginning of the row before them
        self._branches = [_branches(place, start, length, part, device) for part in _alike(start, length, order)]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """[1, n, heads, d] what each token gets from its path, of [1, heads, n, d]; keys may have fewer heads."""
        found = []
        for own, path, present, visible in self._branches:
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
        return torch.cat(found).unsqueeze(0)


def attends_to_all(model: PreTrainedModel) -> bool:
    """Whether every layer sees all earlier tokens: a trie has no windows."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return getattr(config, "sliding_window", None) is None
    return all(kind == "full_attention" for kind in kinds)


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


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    trie: Trie,
    **_: object,
) -> tuple[Tensor, None]:
    return trie.attend(query, key, value, scaling), None


AttentionInterface.register(ATTENTION, _attention)
