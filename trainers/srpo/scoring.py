"""Log-probs of the sampled tokens under a policy's present weights, in micro-batches.

What rows have in common from their first token on (members of a set, episodes of a group, turns of a chat) is computed
once, forward and backward, and so are rows that are equal. Only sampled positions reach the model's head, some at a
time, so no [tokens, vocabulary] matrix is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from srpo_env.batch import EventBatch
from srpo_env.token_trie import Trie, can_share, whole
from srpo_env.trainers.srpo.head import from_hidden, from_logits
from srpo_env.trainers.srpo.pieces import cut, distinct, read

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Scored(NamedTuple):
    """Log-probs of some rows.

    Attributes:
        rows: [m] indices of the rows.
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
        micro_batch_tokens: Most tokens, padding included, of one forward pass; a single row may be longer.
        autocast: Type of the forward pass, where it differs from the weights'.
        share: Computes what rows have in common once. Where a model's attention can't do that, the first rows tell, and
            each row is computed whole from then on.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        micro_batch_tokens: int = 16384,
        autocast: Literal["bfloat16"] | None = None,
        *,
        share: bool = True,
    ) -> None:
        self.model = model
        self.micro_batch_tokens = micro_batch_tokens
        self._autocast = torch.bfloat16 if autocast == "bfloat16" else None
        self._plain_head: bool | None = None  # None: not tried yet
        self._shares: bool | None = None if share else False

    def score(self, batch: EventBatch, rows: Tensor, *, entropy: bool = False) -> Iterator[Scored]:
        """Scores rows, a micro-batch at a time; with gradient where it is enabled.

        Args:
            batch: The events.
            rows: [m] rows of this policy that have a sampled token, and a token before it.
            entropy: Whether to give the entropies, too.
        """
        first, same_as = distinct(batch, rows)
        place = torch.empty(batch.num_members, dtype=torch.int64)
        for piece in self.pieces(batch, first):
            place.fill_(-1)[piece] = torch.arange(len(piece))
            copies = place[same_as]
            chosen = copies >= 0
            logprobs, spread = self._score(batch, piece, entropy)
            at = copies[chosen].to(logprobs.device)
            yield Scored(rows[chosen], logprobs[at], None if spread is None else spread[at])

    def weights(self) -> dict[str, Tensor] | None:
        """The weights for the policy that samples; None where they are its own."""
        return None

    def take(self, model: PreTrainedModel) -> None:
        """Takes the weights of the policy's model, where they are not the same."""

    def pieces(self, batch: EventBatch, rows: Tensor) -> list[Tensor]:
        """Cuts rows with different contents into micro-batches, by what the model turns out to be able to."""
        if not len(rows):
            return []
        if self._plain_head is None:
            self._plain_head = self._head_is_plain(batch.ids[rows[:1], :8])
            self._shares = self._shares if self._plain_head else False
        if self._shares is None:
            self._shares = can_share(self.model)
        return cut(batch, rows, self.micro_batch_tokens, share=self._shares)

    def _score(self, batch: EventBatch, rows: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """[r, t] log-probs of a micro-batch's rows, and their entropies."""
        device = self.model.device
        width = int(batch.length[rows].max())
        mask = batch.mask[rows, :width]
        row, token = torch.nonzero(mask, as_tuple=True)
        ids = batch.ids[rows[row], token].to(device)
        temperature = batch.temperature[rows[row]].to(device)
        row, token = row.to(device), token.to(device)
        with self._cast():
            if self._plain_head:
                hidden = self._hidden(batch, rows, row, token - 1)
                logprobs, spread = from_hidden(hidden, self._head(), ids, temperature, entropy=entropy)
            else:
                inputs = whole(batch.ids[rows], batch.length[rows], device)
                logits = self.model(**inputs, use_cache=False).logits[row, token - 1]
                logprobs, spread = from_logits(logits, ids, temperature, entropy=entropy)
        zeros = torch.zeros(mask.shape, dtype=logprobs.dtype, device=device)
        at = (row, token)
        return zeros.index_put(at, logprobs), None if spread is None else zeros.index_put(at, spread)

    def _hidden(self, batch: EventBatch, rows: Tensor, row: Tensor, token: Tensor) -> Tensor:
        """[n, hidden] states of the given tokens of these rows."""
        ids, length = batch.ids[rows], read(batch, rows)
        if self._shares:
            trie = Trie(ids, length, self.model.device)
            return self._base(**trie.inputs())[0, trie.place[row, token]]
        return self._base(**whole(ids, length, self.model.device))[row, token]

    def _base(self, **inputs: object) -> Tensor:
        hidden: Tensor = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        return hidden

    def _head(self) -> nn.Module:
        return self.model.get_output_embeddings()  # type: ignore[no-any-return]

    @torch.no_grad()
    def _head_is_plain(self, ids: Tensor) -> bool:
        """Whether logits are the output embeddings times the last hidden state; some models scale or cap them.

        The two are the same operations on the same numbers, so they agree to the last bits; a cap of small logits
        changes little more than that.
        """
        if self._head() is None:
            return False
        ids = ids.to(self.model.device)
        expected = self.model(input_ids=ids, use_cache=False).logits
        found = self._head()(self._base(input_ids=ids))
        tolerance = 8 * torch.finfo(expected.dtype).eps * float(expected.abs().max())
        return found.shape == expected.shape and float((found - expected).abs().max()) <= tolerance

    def _cast(self) -> contextlib.AbstractContextManager[None]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.model.device.type, dtype=self._autocast)


def as_grid(parts: Iterable[Scored], shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Lays micro-batches out as [M, T] log-probs and entropies on the CPU, 0 elsewhere."""
    logprobs, entropy = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    for part in parts:
        width = part.logprobs.shape[1]
        logprobs[part.rows, :width] = part.logprobs.detach().to("cpu", dtype)
        if part.entropy is not None:
            entropy[part.rows, :width] = part.entropy.to("cpu", dtype)
    return logprobs, entropy
