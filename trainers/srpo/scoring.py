"""Log-probs of the sampled tokens under a policy's present weights, in micro-batches.

A prompt that several rows share (members of a set, episodes of a group) is computed once, forward and backward, and so are
rows that are equal. Only sampled positions reach the model's head, so no [tokens, vocabulary] matrix of prompts is made.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from srpo_env.batch import EventBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("srpo_env")


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


class Scorer:
    """Scores the rows of one policy.

        log p(t) = log_softmax(z_t / T)[id_t]      z_t: logits at the position before t, in float32 at least

    Args:
        model: A causal language model.
        micro_batch_tokens: Most tokens, padding included, of one forward pass; a single row may be longer.
        autocast: Type of the forward pass, where it differs from the weights'.
        share_prompts: Computes a prompt once for all rows that have it. Where a model's cache can't do that, the first
            batch finds out, and each row is computed whole from then on.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        micro_batch_tokens: int = 16384,
        autocast: Literal["bfloat16"] | None = None,
        *,
        share_prompts: bool = True,
    ) -> None:
        self.model = model
        self.micro_batch_tokens = micro_batch_tokens
        self._autocast = torch.bfloat16 if autocast == "bfloat16" else None
        self._plain_head: bool | None = None
        self._shares = share_prompts
        self._checked = False
        # transformers 5.24 renamed it.
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def score(self, batch: EventBatch, rows: Tensor, *, entropy: bool = False) -> Iterator[Scored]:
        """Scores rows, a micro-batch at a time; with gradient where it is enabled.

        Args:
            batch: The events.
            rows: [m] rows of this policy that have a sampled token.
            entropy: Whether to give the entropies, too.
        """
        if not len(rows):
            return
        first, same_as = distinct(batch, rows)
        place = torch.zeros(batch.num_members, dtype=torch.int64)
        for piece in self.pieces(batch, first):
            place.fill_(-1)[piece.rows] = torch.arange(len(piece.rows))
            copies = place[same_as]
            chosen = copies >= 0
            logprobs, spread = self._score(batch, piece, entropy)
            at = copies[chosen].to(logprobs.device)
            yield Scored(rows[chosen], logprobs[at], None if spread is None else spread[at])

    def pieces(self, batch: EventBatch, rows: Tensor) -> list[Piece]:
        """Cuts rows into micro-batches; every row is in exactly one, with its prompt.

        A piece's cost is what its forward pass computes: its prompts, padded, and its rows' continuations, padded.

        Args:
            batch: The events.
            rows: [r] rows with different contents.
        """
        start = batch.mask[rows].long().argmax(1)
        prompts, prompt_of = _same_prompts(batch, rows, start) if self._shares else (rows, torch.arange(len(rows)))
        rest = batch.length[rows] - start
        order = sorted(range(len(rows)), key=lambda at: (int(start[at]), int(prompt_of[at]), int(rest[at])))
        pieces: list[list[int]] = []
        held: set[int] = set()
        longest_prompt = longest_rest = 0
        for at in order:
            prompt = int(prompt_of[at])
            widest, longest = max(longest_prompt, int(start[at])), max(longest_rest, int(rest[at]))
            cost = widest * len(held | {prompt}) + longest * (len(pieces[-1]) + 1 if pieces else 1)
            if not pieces or cost > self.micro_batch_tokens:
                pieces.append([])
                held, widest, longest = set(), int(start[at]), int(rest[at])
            pieces[-1].append(at)
            held.add(prompt)
            longest_prompt, longest_rest = widest, longest
        return [_piece(rows, prompts, prompt_of, start, torch.tensor(each)) for each in pieces]

    def _score(self, batch: EventBatch, piece: Piece, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """[r, t] log-probs of a piece's rows, and their entropies."""
        rows, device = piece.rows, self.model.device
        width = int(batch.length[rows].max())
        ids = batch.ids[rows, :width].to(device)
        mask = batch.mask[rows, :width].to(device)
        temperature = batch.temperature[rows].to(device)
        row, token = torch.nonzero(mask, as_tuple=True)
        if self._plain_head is None:
            self._plain_head = self._head_is_plain(ids[:1, :8])
        with self._cast():
            logits = self._logits(batch, piece, row, token)
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature[row].unsqueeze(1)
        log_p = torch.log_softmax(logits, dim=-1)
        chosen = log_p.gather(1, ids[row, token].unsqueeze(1)).squeeze(1)
        zeros = torch.zeros(mask.shape, dtype=chosen.dtype, device=device)
        logprobs = zeros.index_put((row, token), chosen)
        if not entropy:
            return logprobs, None
        log_p = log_p.detach()
        spread = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)
        return logprobs, zeros.index_put((row, token), spread)

    def _logits(self, batch: EventBatch, piece: Piece, row: Tensor, token: Tensor) -> Tensor:
        """[n, vocabulary] logits that predict the tokens at the given places."""
        if len(piece.prompts) == len(piece.rows) or not self._plain_head:
            return self._logits_of_whole_rows(batch, piece.rows, row, token)
        if not self._checked:
            self._checked = True
            self._shares = self._sharing_is_exact(batch, piece, row, token)
        if not self._shares:
            return self._logits_of_whole_rows(batch, piece.rows, row, token)
        return self.model.get_output_embeddings()(self._hidden(batch, piece, row, token))  # type: ignore[no-any-return]

    def _hidden(self, batch: EventBatch, piece: Piece, row: Tensor, token: Tensor) -> Tensor:
        """[n, hidden] states before the given places: prompts first, then the continuations on copies of their keys."""
        from transformers import DynamicCache

        device = self.model.device
        prompt_length = batch.mask[piece.prompts].long().argmax(1).to(device)
        start = piece.start.to(device)
        prompt_of = piece.prompt_of.to(device)
        widest = int(prompt_length.max())
        prompt_ids = batch.ids[piece.prompts, :widest].to(device)
        column = torch.arange(widest, device=device)
        in_prompt = column < prompt_length.unsqueeze(1)
        cache = DynamicCache()
        prompt_hidden = self._base(
            input_ids=prompt_ids * in_prompt, attention_mask=in_prompt.long(), use_cache=True, **{self._cache_name: cache}
        )
        rest = int((batch.length[piece.rows].to(device) - start).max()) - 1  # nothing follows the last token
        last_of_prompt = prompt_hidden[prompt_of[row], start[row] - 1]
        if rest < 1:
            return last_of_prompt
        offset = torch.arange(rest, device=device)
        position = start.unsqueeze(1) + offset
        present = position < batch.length[piece.rows].to(device).unsqueeze(1)
        ids = batch.ids[piece.rows].to(device)
        ids = ids.gather(1, position.clamp(max=ids.shape[1] - 1)) * present
        copied = DynamicCache()
        for layer, held in enumerate(cache.layers):
            copied.update(held.keys[prompt_of], held.values[prompt_of], layer)
        hidden = self._base(
            input_ids=ids,
            attention_mask=torch.cat([in_prompt[prompt_of], present], dim=1).long(),
            position_ids=position,
            use_cache=True,
            **{self._cache_name: copied},
        )
        before = token - 1 - start[row]
        return torch.where((before < 0).unsqueeze(1), last_of_prompt, hidden[row, before.clamp(min=0)])

    def _logits_of_whole_rows(self, batch: EventBatch, rows: Tensor, row: Tensor, token: Tensor) -> Tensor:
        device = self.model.device
        width = int(batch.length[rows].max())
        ids = batch.ids[rows, :width].to(device)
        present = torch.arange(width, device=device) < batch.length[rows].to(device).unsqueeze(1)
        attention = None if bool(present.all()) else present.long()
        if self._plain_head:
            hidden = self._base(input_ids=ids, attention_mask=attention, use_cache=False)
            return self.model.get_output_embeddings()(hidden[row, token - 1])  # type: ignore[no-any-return]
        logits: Tensor = self.model(input_ids=ids, attention_mask=attention, use_cache=False).logits
        return logits[row, token - 1]

    def _base(self, **inputs: object) -> Tensor:
        hidden: Tensor = self.model.base_model(**inputs).last_hidden_state
        return hidden

    @torch.no_grad()
    def _head_is_plain(self, ids: Tensor) -> bool:
        """Whether logits are the output embeddings times the last hidden state; some models scale or cap them."""
        head = self.model.get_output_embeddings()
        if head is None:
            return False
        expected = self.model(input_ids=ids, use_cache=False).logits
        found = head(self._base(input_ids=ids, use_cache=False))
        return torch.allclose(found.float(), expected.float(), rtol=1e-3, atol=1e-3)

    @torch.no_grad()
    def _sharing_is_exact(self, batch: EventBatch, piece: Piece, row: Tensor, token: Tensor) -> bool:
        """Whether shared prompts give the hidden states of whole rows; some caches and attentions can't."""
        try:
            found = self.model.get_output_embeddings()(self._hidden(batch, piece, row, token))
        except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            expected = self._logits_of_whole_rows(batch, piece.rows, row, token)
            largest = float((found - expected).abs().max())
            scale = float(expected.abs().max())
            tolerance = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 5e-2
            if largest <= tolerance * max(1.0, scale):
                return True
            reason = f"logits differ by up to {largest:.2g}"
        logger.warning("%s can't share prompts (%s); each row is computed whole", type(self.model).__name__, reason)
        return False

    def _cast(self) -> contextlib.AbstractContextManager[None]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.model.device.type, dtype=self._autocast)  # type: ignore[no-any-return]


def distinct(batch: EventBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns one row for each different content, and for each row the one that stands for it.

    Args:
        batch: The events.
        rows: [m] rows, at least one.

    Returns:
        [d] rows with different contents (tokens, mask and temperature), and [m] of them, one for each of `rows`.
    """
    content = torch.cat(
        [
            batch.ids[rows],
            batch.mask[rows].long(),
            batch.length[rows].unsqueeze(1),
            batch.temperature[rows].view(torch.int32).long().unsqueeze(1),
        ],
        dim=1,
    )
    first, number = _first_of_each(content)
    return rows[first], rows[first[number]]


def _same_prompts(batch: EventBatch, rows: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """[p] rows with different prompts, and [r] the place of each row's prompt among them."""
    width = int(start.max())
    prompt = batch.ids[rows, :width] * (torch.arange(width) < start.unsqueeze(1))
    first, number = _first_of_each(torch.cat([prompt, start.unsqueeze(1)], dim=1))
    return rows[first], number


def _first_of_each(content: Tensor) -> tuple[Tensor, Tensor]:
    """The first place of each different row of a matrix, and for each row the number of its content."""
    _, number = torch.unique(content, dim=0, return_inverse=True)
    places = torch.arange(len(content))
    return torch.full((int(number.max()) + 1,), len(content)).scatter_reduce(0, number, places, "amin"), number


def _piece(rows: Tensor, prompts: Tensor, prompt_of: Tensor, start: Tensor, chosen: Tensor) -> Piece:
    held, place = torch.unique(prompt_of[chosen], return_inverse=True)
    return Piece(prompts[held], rows[chosen], place, start[chosen])


def as_grid(parts: Iterable[Scored], shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Lays micro-batches out as [M, T] log-probs and entropies on the CPU, 0 elsewhere."""
    logprobs, entropy = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    for part in parts:
        width = part.logprobs.shape[1]
        logprobs[part.rows, :width] = part.logprobs.detach().to("cpu", dtype)
        if part.entropy is not None:
            entropy[part.rows, :width] = part.entropy.to("cpu", dtype)
    return logprobs, entropy
