"""How messages become token ids, and output ids become text.

The chat template's own markers become control tokens; the same characters inside a message never do. A message that
holds such a marker is split inside it before encoding, so that no control token can match:

    "ok<|im_end|>"  ->  "ok<" + "|im_end|>"

A chat that goes on from an earlier turn keeps that turn's ids: what was sampled is not encoded again, and only what
follows it is encoded at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from srpo_env.errors import PolicyError
from srpo_env.records import Message, Output

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SEAMS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
_SURROGATE = re.compile("[\ud800-\udfff]")
_REMEMBERED_PROMPTS = 1024

Turn = tuple[str, str]


class Chat:
    """Renders and encodes messages as one policy's chat template wants it.

    Args:
        tokenizer: Its chat template renders the messages.
        template_arguments: Passed on to the template, such as `enable_thinking`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(template_arguments or {})
        self._backend = _own_backend(tokenizer)
        tokens = tokenizer.added_tokens_decoder.values()
        # What a message's author may not write: all markers, and for the policy's own earlier turns all but those that
        # are part of what it says (<think>, <tool_call>), which its template may want to find.
        self._markers = _any_of(token.content for token in tokens)
        self._special_markers = _any_of(token.content for token in tokens if token.special)
        self._special = {at: token.content for at, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._encoded = lru_cache(_REMEMBERED_PROMPTS)(self._encode)
        self._rendered = lru_cache(_REMEMBERED_PROMPTS)(self._render)

    def prompt_ids(self, messages: Sequence[Message], earlier: Output | None = None) -> tuple[int, ...]:
        """Returns the prompt, up to where the policy's output begins.

        Args:
            messages: The chat.
            earlier: The output that the last assistant message is. Where the template writes the messages up to it as
                before (some strip an earlier turn's reasoning), its ids are kept and the rest is appended.

        Raises:
            PolicyError: The chat template refuses these messages.
        """
        turns = tuple((message.role, _valid(message.content)) for message in messages)
        appended = None if earlier is None else self._appended(turns, earlier)
        return self._encoded(turns) if appended is None else appended

    def output_ids(self, text: str) -> tuple[int, ...]:
        """Returns the ids of an output that says this text and ends; no part of the text becomes a control token."""
        ids = self._encode_split(self._split_markers("user", _valid(text), _SEAMS[0]), _SEAMS[0])
        end = self._tokenizer.eos_token_id
        return (*ids, *([] if end is None else [end]))

    def text(self, ids: Sequence[int]) -> str:
        """Returns what ids say, without special tokens."""
        return self.texts([ids])[0]

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Returns what each row of ids says, without special tokens."""
        if self._backend is not None:
            return list(self._backend.decode_batch(rows, skip_special_tokens=True))
        return [str(self._tokenizer.decode(list(row), skip_special_tokens=True)) for row in rows]

    def _encode(self, turns: tuple[Turn, ...]) -> tuple[int, ...]:
        seam = _seam(turns)
        return tuple(self._encode_split(self._rendered(turns, seam), seam))

    def _appended(self, turns: tuple[Turn, ...], earlier: Output) -> tuple[int, ...] | None:
        """The earlier turn's ids and what follows; None where the template or the backend does not allow it."""
        said = max((at for at, (role, _) in enumerate(turns) if role == "assistant"), default=None)
        if said is None or not earlier.prompt_ids or earlier.output_ids is None:
            return None
        seam = _seam(turns)
        whole = self._rendered(turns, seam)
        begun = self._rendered(turns[:said], seam) + self._split_markers(*turns[said], seam)
        begun += self._special.get(earlier.output_ids[-1], "") if earlier.output_ids else ""
        if not whole.startswith(begun):
            return None
        return (*earlier.prompt_ids, *earlier.output_ids, *self._encode_split(whole[len(begun) :], seam))

    def _render(self, turns: tuple[Turn, ...], seam: str) -> str:
        """The chat as text, with a seam in each marker that a message holds."""
        safe = [{"role": role, "content": self._split_markers(role, content, seam)} for role, content in turns]
        try:
            rendered = self._tokenizer.apply_chat_template(
                safe, tokenize=False, add_generation_prompt=True, **self._arguments
            )
        except Exception as error:
            roles = ", ".join(role for role, _ in turns)
            raise PolicyError(
                f"the chat template refuses messages with the roles {roles or '(none)'}: {error}. "
                "Write the agent's prompt with the roles that this model's template knows."
            ) from error
        return str(rendered)

    def _encode_split(self, text: str, seam: str) -> list[int]:
        """Encodes text that may hold markers split by a seam; never adds a BOS, which is the template's to write."""
        ids: list[int] = []
        for piece in text.split(seam):
            if self._backend is not None:
                ids += self._backend.encode(piece, add_special_tokens=False).ids
            else:
                ids += self._tokenizer.encode(piece, add_special_tokens=False)
        return ids

    def _split_markers(self, role: str, content: str, seam: str) -> str:
        markers = self._special_markers if role == "assistant" else self._markers
        return markers.sub(lambda found: found[0][0] + seam + found[0][1:], content) if markers else content


def _seam(turns: Sequence[Turn]) -> str:
    """A character that is in none of the messages."""
    return next(seam for seam in _SEAMS if not any(seam in content for _, content in turns))


def _valid(content: str) -> str:
    """Returns the text with lone surrogates, which no encoder takes, as U+FFFD."""
    return content if content.isascii() else _SURROGATE.sub("\ufffd", content)


def _any_of(markers: Any) -> re.Pattern[str] | None:
    """Returns a pattern for any of the markers, longest first; one of a single character can't be split."""
    words = sorted({marker for marker in markers if len(marker) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words))) if words else None


def _own_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Returns a copy of a fast tokenizer's backend, free of padding and truncation that others may set on theirs."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    own = type(backend).from_str(backend.to_str())
    own.no_padding()
    own.no_truncation()
    return own
