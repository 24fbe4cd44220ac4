"""How a token is drawn from logits: temperature, top-k, top-p, and randomness that belongs to the row alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from srpo_env.records import Sampling

_LOGITS_AT_ONCE = 1 << 24
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Settings:
    """How each row of a batch is sampled.

    Attributes:
        temperature: [n] float32; 1 where the row is greedy.
        greedy: [n] bool, or None where no row is.
        top_k, top_p: [n], or None where no row is filtered. A top_k of 0 keeps all.
        streams: [n] uint64, the state of each row's random stream.
    """

    temperature: Tensor
    greedy: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    streams: NDArray[np.uint64]

    @classmethod
    def of(cls, rows: Sequence[Sampling], seeds: Sequence[int], device: torch.device) -> Settings:
        """Lays the settings of the rows out as tensors."""
        greedy = [row.temperature == 0 for row in rows]
        filtered = any(row.top_k or row.top_p < 1 for row in rows)

        def tensor(values: Sequence[float | bool], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            temperature=tensor([row.temperature or 1.0 for row in rows], torch.float32),
            greedy=tensor(greedy, torch.bool) if any(greedy) else None,
            top_k=tensor([row.top_k for row in rows], torch.int64) if filtered else None,
            top_p=tensor([row.top_p for row in rows], torch.float32) if filtered else None,
            streams=_mixed(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)),
        )

    def part(self, start: int, end: int) -> Settings:
        """Returns the settings of the rows in [start, end)."""
        return Settings(
            self.temperature[start:end],
            None if self.greedy is None else self.greedy[start:end],
            None if self.top_k is None else self.top_k[start:end],
            None if self.top_p is None else self.top_p[start:end],
            self.streams[start:end],
        )


def choose(logits: Tensor, settings: Settings, steps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Draws one token a row.

        p = softmax(filter(logits / temperature)),   token = min {v : p_1 + ... + p_v > u},   u = u(seed, step)

    Args:
        logits: [n, V].
        settings: Those of the n rows.
        steps: Tokens that each row has drawn before; with the row's seed it decides the draw.

    Returns:
        The tokens [n] int64 and their log-probs [n] float32, of the distribution they were drawn from: 0 for a greedy
        row, whose distribution is one point; NaN where the logits hold NaN.
    """
    uniforms = torch.from_numpy(uniform(settings.streams, np.asarray(steps, dtype=np.uint64))).to(logits.device)
    size = max(1, _LOGITS_AT_ONCE // logits.shape[-1])
    if len(logits) <= size:
        return _choose(logits, settings, uniforms)
    parts = [
        _choose(
            logits[start : start + size],
            settings.part(start, start + size),
            uniforms[start : start + size],
        )
        for start in range(0, len(logits), size)
    ]
    return torch.cat([ids for ids, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def _choose(logits: Tensor, settings: Settings, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    tempered = logits.float() / settings.temperature[:, None]
    if settings.top_k is not None and settings.top_p is not None:
        tempered = filtered(tempered, settings.top_k, settings.top_p)
    logprobs = torch.log_softmax(tempered, dim=-1)
    # float64: the sum of 150,000 float32 probabilities would not know which of the last ones it passed.
    total = logprobs.exp().cumsum(-1, dtype=torch.float64)
    ids = torch.searchsorted(total, uniforms[:, None] * total[:, -1:], right=True).clamp_(max=logits.shape[-1] - 1)
    chosen = logprobs.gather(-1, ids)
    if settings.greedy is not None:
        greedy = settings.greedy[:, None]
        ids = torch.where(greedy, logits.argmax(-1, keepdim=True), ids)
        chosen = torch.where(greedy & ~chosen.isnan(), 0.0, chosen)
    return ids[:, 0], chosen[:, 0]


def filtered(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Returns logits with -inf outside the top k, then outside the smallest set of what is left with mass top_p.

    Args:
        logits: [n, V], tempered.
        top_k: [n]; 0 keeps all.
        top_p: [n]; 1 keeps all.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    outside = (rank >= top_k[:, None]) & (top_k[:, None] > 0)
    ordered = ordered.masked_fill(outside, -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    outside |= (before >= top_p[:, None]) & (top_p[:, None] < 1)
    outside[:, 0] = False
    return logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)


def uniform(streams: NDArray[np.uint64], steps: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Returns u(stream, step) in [0, 1): SplitMix64 (Steele et al., 2014) as a counter-based generator."""
    with np.errstate(over="ignore"):
        bits: NDArray[np.uint64] = _mixed(streams + (steps + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
