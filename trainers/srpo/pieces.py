"""Which rows pass through the model together?"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from srpo_env.batch import EventBatch
from srpo_env.token_trie import passes


def distinct(batch: EventBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns one row for each different content, and for each row the one that stands for it.

    Args:
        batch: The events.
        rows: [m] rows.

    Returns:
        [d] rows with different contents (tokens, mask and temperature), and [m] of them, one for each of `rows`.
    """
    ids, mask, temperature = (each[rows].numpy() for each in (batch.ids, batch.mask, batch.temperature))
    each_row = zip(ids, mask, batch.length[rows].tolist(), temperature.tolist(), strict=True)
    first, number = _first_of_each((i[:n].tobytes(), m[:n].tobytes(), T) for i, m, n, T in each_row)
    return rows[first], rows[first[number]]


def cut(batch: EventBatch, rows: Tensor, most_tokens: int, *, share: bool) -> list[Tensor]:
    """Cuts rows into micro-batches; every row is in exactly one.

    Args:
        batch: The events.
        rows: [r] rows with different contents.
        most_tokens: Most tokens that the forward pass of several rows computes, padding included.
        share: Whether rows share the tokens of a common beginning; else each is padded to the longest of its pass.

    Returns:
        Rows of each micro-batch: where they share, in lexicographic order, else by length.
    """
    parts = passes(batch.ids[rows], read(batch, rows), most_tokens, share=share)
    return [rows[part] for part in parts]


def read(batch: EventBatch, rows: Tensor) -> Tensor:
    """[r] how many tokens of a row the model reads: nothing follows the last sampled one."""
    place = torch.arange(batch.mask.shape[1])
    return (batch.mask[rows] * place).amax(1)


def _first_of_each(contents: Iterable[Hashable]) -> tuple[Tensor, Tensor]:
    """The first place of each different content, and for each content its number."""
    numbers: dict[Hashable, int] = {}
    number = torch.tensor([numbers.setdefault(content, len(numbers)) for content in contents], dtype=torch.int64)
    first = torch.full((len(numbers),), len(number))
    return first.scatter_reduce(0, number, torch.arange(len(number)), "amin"), number
