"""Samples many rows at once: rows that stop leave the batch, new ones enter, prompts share beginnings."""

from __future__ import annotations

import inspect
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from srpo_env.agents.choosing import Settings, choose
from srpo_env.agents.slots import Slots
from srpo_env.errors import MissingModel
from srpo_env.records import FinishReason, Sampling
from srpo_env.token_trie import Trie, can_share, passes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PREFILL_TOKENS = 8192
_PREFILL_LOGITS = 1 << 25
_COLUMNS = 32
_KEPT_BYTES = 1 << 28


class Interrupted(Exception):
    """The sampling was called off in the middle of a prefill."""


@dataclass(slots=True, eq=False)
class Row:
    """One output in the making.

    Attributes:
        prompt: Its token ids.
        sampling: Its settings.
        limit: Most tokens of its output.
        seed: Decides its randomness.
        owner: Whatever the caller wants to find again.
        version: Version of the weights that it began with.
        output: Token ids sampled so far, the stop token included.
        logprobs: One for each of them.
        finish_reason: Set once it is done; still None where it broke.
        broken: The logits were not finite.
        began: When it was asked for, by `time.perf_counter`.
        seconds: From then to its last token.
        length: Tokens of prompt and output.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    limit: int
    seed: int
    owner: Any = None
    version: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    broken: bool = False
    seconds: float = 0.0
    began: float = field(default_factory=time.perf_counter)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = len(self.prompt) + len(self.output)

    @property
    def done(self) -> bool:
        """Whether there is nothing left to sample."""
        return self.broken or self.finish_reason is not None


class Generator:
    """A batch of rows that a model samples together, one token a row and step.

    Args:
        model: A decoder whose layers are all attention.
        stop_ids: Tokens that end a row.
        text: Decodes ids; for stop strings.
        max_rows: Most rows in the batch.
        cache_bytes: Most memory of their keys and values; at least one row is always let in.
        interrupted: Asked in every layer of a prefill, which may take long.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stop_ids: frozenset[int],
        text: Callable[[Sequence[int]], str],
        *,
        max_rows: int,
        cache_bytes: int,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.stop_ids = stop_ids
        self.version = 0
        self._model = model
        self._text = text
        self._max_rows = max_rows
        self._cache_bytes = cache_bytes
        self._interrupted = interrupted
        kinds = _kinds_of_layers(model)
        window = getattr(model.config.get_text_config(), "sliding_window", None)
        self._window: int | None = window if not kinds or "sliding_attention" in kinds else None
        self._masks_by_kind = bool(kinds)
        # transformers 5.24 renamed it.
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []
        self._settings: Settings | None = None

    @property
    def busy(self) -> bool:
        """Whether any row is not done."""
        return bool(self._rows or self._waiting)

    def add(self, rows: Iterable[Row]) -> None:
        """Queues rows; they enter as there is room, in this order."""
        self._waiting.extend(rows)

    @torch.inference_mode()
    def drop(self, unwanted: Callable[[Row], bool]) -> None:
        """Removes rows, wherever they are."""
        self._waiting = deque(row for row in self._waiting if not unwanted(row))
        self._keep([not unwanted(row) for row in self._rows])

    @torch.inference_mode()
    def clear(self) -> None:
        """Removes all rows and frees the cache."""
        self._waiting.clear()
        self._rows.clear()
        self._settings = None
        self._free()

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Samples one token for each row in the batch, after letting rows in; returns those that are done."""
        # The learner, which shares the model, may have left it in train mode.
        if self._model.training:
            self._model.train(False)
        done = self._admit()
        if self._rows:
            done += self._decode()
        if any(row.broken for row in done):
            self._slots.clean()
        if not self.busy:
            self._free()
        return done

    def _admit(self) -> list[Row]:
        """Prefills the rows that there is room for and samples their first token."""
        room = self._room()
        # A prefill reads all the weights, so a few rows are let in together rather than one at each step.
        if not room or (self._rows and room < min(len(self._waiting), 1 + len(self._rows) // 8)):
            return []
        same: dict[tuple[int, ...], list[Row]] = {}
        for row in (self._waiting.popleft() for _ in range(room)):
            same.setdefault((*row.prompt, *row.output), []).append(row)
        rows = list(same.values())
        length = torch.tensor([len(prompt) for prompt in same])
        ids = torch.zeros(len(same), int(length.max()), dtype=torch.int64)
        ids[torch.arange(ids.shape[1]) < length[:, None]] = torch.tensor([each for prompt in same for each in prompt])
        longest = max(ids.shape[1], *(row.length for row in self._rows), 0)
        self._reserve(len(self._rows) + room, _rounded(longest + _COLUMNS))
        done = []
        for part in passes(ids, length, _PREFILL_TOKENS, share=self._shares):
            for piece in part.split(self._prefill_rows):
                done += self._prefill(ids[piece], length[piece], [rows[index] for index in piece.tolist()])
        return done

    @cached_property
    def _shares(self) -> bool:
        """Whether what prompts have in common is computed once."""
        return can_share(self._model)

    @cached_property
    def _prefill_rows(self) -> int:
        """Most prompts of a pass: as many as there is memory for the logits of."""
        rows = _PREFILL_LOGITS // self._model.config.get_text_config().vocab_size
        return max(1, rows if self._shares else math.isqrt(rows))

    def _room(self) -> int:
        """How many of the waiting rows can enter now."""
        longest = max((row.length for row in self._rows), default=0)
        room = 0
        for row in self._waiting:
            count = len(self._rows) + room + 1
            longest = max(longest, row.length)
            if count > self._max_rows or not self._fits(count, _rounded(longest + _COLUMNS)):
                break
            room += 1
        return room

    def _fits(self, rows: int, columns: int) -> bool:
        return rows == 1 or rows * columns * self._slots.bytes_per_token <= self._cache_bytes

    def _prefill(self, ids: Tensor, length: Tensor, same: Sequence[Sequence[Row]]) -> list[Row]:
        """Computes prompts, samples the next token of the rows that share each, and puts the rows into slots."""
        cache = _Watched(self._interrupted)
        logits, place = (self._read_trie if self._shares else self._read_whole)(ids, length, cache)
        device = self._model.device
        rows = [row for sharing in same for row in sharing]
        source = [index for index, sharing in enumerate(same) for _ in sharing]
        for row in rows:
            row.version = row.version if row.output else self.version
        settings = Settings.of([row.sampling for row in rows], [row.seed for row in rows], device)
        self._extend(rows, *choose(logits[source], settings, [len(row.output) for row in rows]))

        staying = [position for position, row in enumerate(rows) if not row.done]
        if staying:
            chosen = torch.tensor([source[position] for position in staying], device=device)
            self._slots.fill(len(self._rows), cache, *(each[chosen] for each in place))
            self._rows += [rows[position] for position in staying]
            self._settings = None
        return [row for row in rows if row.done]

    def _read_trie(self, ids: Tensor, length: Tensor, cache: DynamicCache) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """[n, V] logits after each prompt, and the rows [n, 1] and columns [n, width] of the cache that hold it."""
        trie = Trie(ids, length, self._model.device)
        last = trie.place[torch.arange(len(ids)), length - 1]
        logits = self._forward(**trie.inputs(), logits_to_keep=last, cache=cache)[0]
        # Columns after a prompt's end are never looked at, but must be there.
        return logits, (torch.zeros_like(last)[:, None], trie.place.clamp(max=len(trie.ids) - 1))

    def _read_whole(self, ids: Tensor, length: Tensor, cache: DynamicCache) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """As `_read_trie`, each prompt padded to the longest."""
        # On the right, so that causality alone keeps the padding out of sight.
        ids = ids[:, : int(length.max())].to(self._model.device)
        last, column = torch.unique(length.to(ids.device) - 1, return_inverse=True)
        row = torch.arange(len(ids), device=ids.device)
        logits = self._forward(input_ids=ids, logits_to_keep=last, cache=cache)[row, column]
        return logits, (row[:, None], torch.arange(ids.shape[1], device=ids.device).expand_as(ids))

    def _reserve(self, rows: int, columns: int) -> None:
        """Makes memory for rows and columns; keeps more of either where the limit allows it."""
        slots = self._slots
        if slots.rows >= rows and slots.columns >= columns:
            return
        most = max(slots.rows, rows), max(slots.columns, columns)
        slots.resize(*(most if self._fits(*most) else (rows, columns)), len(self._rows))

    def _decode(self) -> list[Row]:
        self._make_columns()
        rows, slots, device = self._rows, self._slots, self._model.device
        if self._settings is None:
            self._settings = Settings.of([row.sampling for row in rows], [row.seed for row in rows], device)
        # The last token is not in the cache yet: it goes to the column that is its position.
        last = torch.tensor([row.output[-1] for row in rows], device=device)
        position = torch.tensor([row.length - 1 for row in rows], device=device)
        width = max(row.length for row in rows)
        slots.aim(position, width)
        logits = self._forward(
            input_ids=last[:, None],
            position_ids=position[:, None],
            attention_mask=self._mask(position, width),
            cache=slots,
        )
        self._extend(rows, *choose(logits[:, 0], self._settings, [len(row.output) for row in rows]))
        done = [row for row in rows if row.done]
        if done:
            self._keep([not row.done for row in rows])
        return done

    def _make_columns(self) -> None:
        """Makes sure that every row has a column for its last token; sends rows back to wait where memory lacks."""
        width = max(row.length for row in self._rows)
        if width <= self._slots.columns:
            return
        columns = _rounded(width + min(width // 2, 8 * _COLUMNS))
        if not self._fits(len(self._rows), columns):
            columns = _rounded(width)
        while not self._fits(len(self._rows), columns):
            self._waiting.appendleft(self._rows.pop())
            self._settings = None
        self._reserve(len(self._rows), columns)

    def _keep(self, wanted: Sequence[bool]) -> None:
        """Closes the gaps that unwanted rows leave with the last rows of the batch."""
        count = sum(wanted)
        gaps = [slot for slot in range(count) if not wanted[slot]]
        movers = [slot for slot in range(count, len(wanted)) if wanted[slot]]
        if movers:
            self._slots.move(movers, gaps, max(self._rows[slot].length for slot in movers))
        for gap, mover in zip(gaps, movers, strict=True):
            self._rows[gap] = self._rows[mover]
        if count < len(self._rows):
            del self._rows[count:]
            self._settings = None

    def _extend(self, rows: Sequence[Row], ids: Tensor, logprobs: Tensor) -> None:
        now = time.perf_counter()
        for row, token, logprob in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
            if logprob != logprob:
                row.broken = True
                continue
            row.output.append(token)
            row.logprobs.append(logprob)
            row.length += 1
            if token in self.stop_ids or (row.sampling.stop and self._holds_stop(row)):
                row.finish_reason = "stop"
            elif len(row.output) >= row.limit:
                row.finish_reason = "length"
            row.seconds = now - row.began

    def _holds_stop(self, row: Row) -> bool:
        """Whether the last token completed a stop string."""
        # A token is at least one byte, so this many hold the longest; a few more let split characters decode.
        reach = max(len(stop.encode()) for stop in row.sampling.stop) + 8
        tail = self._text(row.output[-reach:])
        return any(stop in tail for stop in row.sampling.stop)

    def _forward(self, *, cache: DynamicCache | Slots, **inputs: Any) -> Tensor:
        logits: Tensor = self._model(**inputs, **{self._cache_name: cache}, use_cache=True).logits
        return logits

    def _mask(self, position: Tensor, width: int) -> Any:
        """Returns what each row may attend to, [n, 1, 1, width]: its own columns, or the last ones of a window."""
        column = torch.arange(width, device=position.device)
        hidden = column > position[:, None]
        if self._window is None:
            return self._as_mask(hidden)
        far = self._as_mask(hidden | (column <= position[:, None] - self._window))
        return {"full_attention": self._as_mask(hidden), "sliding_attention": far} if self._masks_by_kind else far

    def _as_mask(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)[:, None, None]

    @cached_property
    def _slots(self) -> Slots:
        """Memory for keys and values, shaped after what a one-token pass leaves in its cache."""
        cache = DynamicCache()
        self._forward(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self._model.device), cache=cache)
        return Slots(cache)

    def _free(self) -> None:
        """Gives a large cache back; a small one is kept for the next batch."""
        slots = self.__dict__.get("_slots")
        if slots is not None and slots.rows * slots.columns * slots.bytes_per_token > _KEPT_BYTES:
            slots.resize(0, 0, 0)


class _Watched(DynamicCache):
    """The cache of a prefill, which can be interrupted between layers."""

    def __init__(self, interrupted: Callable[[], bool]) -> None:
        super().__init__()
        self._interrupted = interrupted

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._interrupted():
            raise Interrupted
        return super().update(*args, **kwargs)


def _kinds_of_layers(model: PreTrainedModel) -> set[str]:
    """What kinds of layers a model has, where its config says so.

    Raises:
        MissingModel: Some have no keys and values.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise MissingModel(
            f"{type(model).__name__} has layers of type {', '.join(sorted(other))}; the backend `local` samples models "
            "with full or sliding attention only. Use the backend `server`."
        )
    return kinds


def most_tokens(rows: int, prompt: int, output: int) -> tuple[int, int]:
    """Returns of how many tokens keys and values are kept at most: in the slots of the rows, and in a prefill."""
    return rows * _rounded(prompt + max(output, _COLUMNS)), min(rows * prompt, _PREFILL_TOKENS)


def _rounded(columns: int) -> int:
    return -(-columns // _COLUMNS) * _COLUMNS
