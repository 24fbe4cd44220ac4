"""Log-probs of the sampled tokens under a policy's present weights, in micro-batches.

Only sampled positions reach the model's head, so no [tokens, vocabulary] matrix of the prompts is ever made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from srpo_env.batch import EventBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Scored(NamedTuple):
    """Log-probs of a micro-batch.

    Attributes:
        rows: [m] indices of its rows.
        logprobs: [m, t] log-probs of the tempered distribution at the sampled tokens, 0 elsewhere.
        entropy: [m, t] entropy of that distribution in nats, detached; 0 elsewhere; None where it was not asked for.
    """

    rows: Tensor
    logprobs: Tensor
    entropy: Tensor | None


class Scorer:
    """Scores the rows of one policy.

        log p(t) = log_softmax(z_t / T)[id_t]      z_t: logits at the position before t, in float32 at least

    Args:
        model: A causal language model.
        micro_batch_tokens: Most tokens, padding included, of one forward pass.
        autocast: Type of the forward pass, where it differs from the weights'.
    """

    def __init__(
        self, model: PreTrainedModel, micro_batch_tokens: int = 16384, autocast: Literal["bfloat16"] | None = None
    ) -> None:
        self.model = model
        self.micro_batch_tokens = micro_batch_tokens
        self._autocast = torch.bfloat16 if autocast == "bfloat16" else None
        self._plain_head: bool | None = None

    def micro_batches(self, length: Tensor, rows: Tensor) -> list[Tensor]:
        """Cuts rows into micro-batches of about equal lengths; every row is in exactly one.

        Args:
            length: [M] ids of each row.
            rows: [m] the rows to cut up.
        """
        ordered = rows[torch.argsort(length[rows], stable=True)]
        pieces: list[Tensor] = []
        start = 0
        for end in range(1, len(ordered) + 1):
            full = end < len(ordered) and int(length[ordered[end]]) * (end + 1 - start) > self.micro_batch_tokens
            if full or end == len(ordered):
                pieces.append(ordered[start:end])
                start = end
        return pieces

    def score(self, batch: EventBatch, rows: Tensor, *, entropy: bool = False) -> Iterator[Scored]:
        """Scores rows, a micro-batch at a time; with gradient where it is enabled.

        Rows that are equal (same tokens, same mask, same temperature), as the members of a set that say the same, are
        computed once; autograd sums what flows back to them.

        Args:
            batch: The events.
            rows: [m] rows of this policy that have a sampled token.
            entropy: Whether to give the entropies, too.
        """
        first, same_as = distinct(batch, rows)
        place = torch.zeros(batch.num_members, dtype=torch.int64)
        for piece in self.micro_batches(batch.length, first):
            place.fill_(-1)[piece] = torch.arange(len(piece))
            copies = place[same_as]
            chosen = copies >= 0
            found = self._score(batch, piece, entropy)
            at = copies[chosen].to(found.logprobs.device)
            yield Scored(rows[chosen], found.logprobs[at], None if found.entropy is None else found.entropy[at])

    def _score(self, batch: EventBatch, rows: Tensor, entropy: bool) -> Scored:
        width = int(batch.length[rows].max())
        device = self.model.device
        ids = batch.ids[rows, :width].to(device)
        mask = batch.mask[rows, :width].to(device)
        present = torch.arange(width, device=device) < batch.length[rows].to(device).unsqueeze(1)
        temperature = batch.temperature[rows].to(device)
        where_row, where_token = torch.nonzero(mask, as_tuple=True)
        with self._cast():
            logits = self._logits(ids, present, where_row, where_token)
        logits = _at_least_float32(logits) / temperature[where_row].to(logits.device).unsqueeze(1)
        log_p = torch.log_softmax(logits, dim=-1)
        chosen = log_p.gather(1, ids[where_row, where_token].unsqueeze(1)).squeeze(1)
        zeros = torch.zeros(mask.shape, dtype=chosen.dtype, device=device)
        logprobs = zeros.index_put((where_row, where_token), chosen)
        if not entropy:
            return Scored(rows, logprobs, None)
        log_p = log_p.detach()
        spread = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)
        return Scored(rows, logprobs, zeros.index_put((where_row, where_token), spread))

    def _logits(self, ids: Tensor, present: Tensor, where_row: Tensor, where_token: Tensor) -> Tensor:
        """[n, vocabulary] logits that predict the tokens at the given places."""
        if self._plain_head is None:
            self._plain_head = self._head_is_plain(ids[:1, :8])
        attention = None if bool(present.all()) else present.long()
        if not self._plain_head:
            full = self.model(input_ids=ids, attention_mask=attention, use_cache=False).logits
            return full[where_row, where_token - 1]
        hidden = self.model.base_model(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings()
        return head(hidden[where_row, where_token - 1])  # type: ignore[no-any-return]

    @torch.no_grad()
    def _head_is_plain(self, ids: Tensor) -> bool:
        """Whether logits are the output embeddings times the last hidden state; some models scale or cap them."""
        head = self.model.get_output_embeddings()
        if head is None:
            return False
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        expected = self.model(input_ids=ids, use_cache=False).logits
        return torch.allclose(head(hidden).float(), expected.float(), rtol=1e-3, atol=1e-3)

    def _cast(self) -> contextlib.AbstractContextManager[None]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.model.device.type, dtype=self._autocast)  # type: ignore[no-any-return]


def distinct(batch: EventBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns one row for each different content, and for each row the one that stands for it.

    Args:
        batch: The events.
        rows: [m] rows.

    Returns:
        [d] rows with different contents, and [m] of them, one for each of `rows`.
    """
    if not len(rows):
        return rows, rows
    content = torch.cat(
        [
            batch.ids[rows],
            batch.mask[rows].long(),
            batch.length[rows].unsqueeze(1),
            batch.temperature[rows].view(torch.int32).long().unsqueeze(1),
        ],
        dim=1,
    )
    _, number = torch.unique(content, dim=0, return_inverse=True)
    first = torch.full((int(number.max()) + 1,), len(rows)).scatter_reduce(0, number, torch.arange(len(rows)), "amin")
    return rows[first], rows[first[number]]


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def as_grid(parts: Iterable[Scored], shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Lays micro-batches out as [M, T] log-probs and entropies on the CPU, 0 elsewhere."""
    logprobs, entropy = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    for part in parts:
        width = part.logprobs.shape[1]
        logprobs[part.rows, :width] = part.logprobs.detach().to("cpu", dtype)
        if part.entropy is not None:
            entropy[part.rows, :width] = part.entropy.to("cpu", dtype)
    return logprobs, entropy
