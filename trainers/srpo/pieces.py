"""Which rows pass through the model together, and what do they share?"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from srpo_env.batch import EventBatch


class Piece(NamedTuple):
    """What one forward pass computes.

    Attributes:
        prompts: [p] rows with different prompts, one for each prompt.
        rows: [r] rows with different contents.
        prompt_of: [r] the place of each row's prompt in `prompts`.
        start: [r] where each row's first sampled token stands: the length of its prompt.
    """

    prompts: Tensor
    rows: Tensor
    prompt_of: Tensor
    start: Tensor


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


def cut(batch: EventBatch, rows: Tensor, most_tokens: int, *, share_prompts: bool) -> list[Piece]:
    """Cuts rows into micro-batches; every row is in exactly one, with its prompt.

    A piece's cost is what its forward pass computes: its prompts, padded, and its rows' continuations, padded.

    Args:
        batch: The events.
        rows: [r] rows with different contents.
        most_tokens: Highest cost of a piece with more than one row.
        share_prompts: Whether equal prompts of a piece are one.
    """
    start = first_sampled(batch, rows)
    prompts, prompt_of = _same_prompts(batch, rows, start) if share_prompts else (rows, torch.arange(len(rows)))
    rest = batch.length[rows] - start
    order = np.lexsort((rest, prompt_of, start))  # rows of one prompt are neighbours, prompts of one length, too
    wanted = zip(*(each[order].tolist() for each in (start, prompt_of, rest)), strict=True)
    ends, held, longest, number, last = [], 0, 0, 0, -1
    for at, (width, prompt, length) in enumerate(wanted):
        held += prompt != last
        longest, number, last = max(longest, length), number + 1, prompt
        if number > 1 and width * held + longest * number > most_tokens:
            ends.append(at)
            held, longest, number = 1, length, 1
    parts = np.split(order, ends) if len(order) else []
    return [_piece(rows, prompts, prompt_of, start, torch.from_numpy(part)) for part in parts]


def first_sampled(batch: EventBatch, rows: Tensor) -> Tensor:
    """[r] the place of each row's first sampled token."""
    return batch.mask[rows].to(torch.uint8).argmax(1)


def _same_prompts(batch: EventBatch, rows: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """[p] rows with different prompts, and [r] the place of each row's prompt among them."""
    ids = batch.ids[rows].numpy()
    first, number = _first_of_each(row[:end].tobytes() for row, end in zip(ids, start.tolist(), strict=True))
    return rows[first], number


def _first_of_each(contents: Iterable[Hashable]) -> tuple[Tensor, Tensor]:
    """The first place of each different content, and for each content its number."""
    numbers: dict[Hashable, int] = {}
    number = torch.tensor([numbers.setdefault(content, len(numbers)) for content in contents], dtype=torch.int64)
    first = torch.full((len(numbers),), len(number))
    return first.scatter_reduce(0, number, torch.arange(len(number)), "amin"), number


def _piece(rows: Tensor, prompts: Tensor, prompt_of: Tensor, start: Tensor, chosen: Tensor) -> Piece:
    held, place = torch.unique(prompt_of[chosen], return_inverse=True)
    return Piece(prompts[held], rows[chosen], place, start[chosen])
