"""The keys and values of the rows that are being sampled: one slot a row, one column a token.

Row i lies in slot i, its tokens in columns 0, 1, ... without padding, so a column is a position. A row that leaves is
replaced by the last one; a row that enters takes the next slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache


class Slots(Cache):
    """A key-value cache whose rows have lengths of their own.

    Args:
        probe: Keys and values of a short forward pass; tells each layer's shape.
    """

    def __init__(self, probe: DynamicCache) -> None:
        super().__init__(layers=[])
        pairs = [_keys_and_values(layer) for layer in probe.layers]
        self.keys = [keys[:0, :, :0] for keys, _ in pairs]
        self.values = [values[:0, :, :0] for _, values in pairs]
        self.bytes_per_token = sum(part[0, :, 0].nbytes for pair in pairs for part in pair)
        self._slot = self._column = torch.empty(0, dtype=torch.int64)
        self._width = 0

    @property
    def rows(self) -> int:
        """Slots that there is memory for."""
        return len(self.keys[0])

    @property
    def columns(self) -> int:
        """Tokens a slot has memory for."""
        return self.keys[0].shape[2]

    def clean(self) -> None:
        """Zeroes what is not finite: even where no row may look, 0 * NaN would reach it."""
        for part in (*self.keys, *self.values):
            part.nan_to_num_(0.0, 0.0, 0.0)

    def resize(self, rows: int, columns: int, kept_rows: int) -> None:
        """Makes memory for this many slots and columns, zeroed; what the first slots hold is kept."""
        for parts in (self.keys, self.values):
            for layer, old in enumerate(parts):
                new = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
                kept = min(columns, old.shape[2])
                new[:kept_rows, :, :kept] = old[:kept_rows, :, :kept]
                parts[layer] = new

    def fill(self, first: int, source: DynamicCache, row: Tensor, token: Tensor) -> None:
        """Copies tokens of a prefilled cache into the slots from `first` on.

        Args:
            first: The slot that comes first.
            source: The prefilled cache.
            row: [n, 1] row of the source for each slot.
            token: [n, width] places of the tokens in it.
        """
        count, width = token.shape
        for layer, cached in enumerate(source.layers):
            for parts, new in zip((self.keys, self.values), _keys_and_values(cached), strict=True):
                _, heads, length, size = new.shape
                head = torch.arange(heads, device=new.device)[:, None]
                line = (row[:, :, None] * heads + head) * length + token[:, None]  # [n, heads, width]
                found = new.reshape(-1, size).index_select(0, line.flatten()).view(count, heads, width, size)
                parts[layer][first : first + count, :, :width] = found

    def move(self, sources: Sequence[int], targets: Sequence[int], width: int) -> None:
        """Copies the first `width` columns of some slots to other slots."""
        device = self.keys[0].device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for part in (*self.keys, *self.values):
            read = part[:, :, :width]
            read.index_copy_(0, target, read.index_select(0, source))

    def aim(self, lengths: Tensor, width: int) -> None:
        """Says where the next forward pass writes: column `lengths[i]` of slot i, of `width` columns it then reads."""
        self._slot, self._column, self._width = torch.arange(len(lengths), device=lengths.device), lengths, width

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes one token a row and returns all that the rows hold: [n, heads, width, head size] each."""
        return (
            self._write(self.keys[layer_idx], key_states),
            self._write(self.values[layer_idx], value_states),
        )

    def _write(self, part: Tensor, new: Tensor) -> Tensor:
        part[self._slot, :, self._column] = new[:, :, 0]
        return part[: len(self._slot), :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that the rows held before the next forward pass."""
        return self._width - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns that the next forward pass reads, and the first of them."""
        return self._width, 0


def _keys_and_values(layer: Any) -> tuple[Tensor, Tensor]:
    """[n, heads, T, head size] each."""
    return layer.keys, layer.values
