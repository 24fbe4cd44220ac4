"""Outputs from a function or a table: for tests, demos and replayed transcripts."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, model_validator

from srpo_env.agents.chat import Chat
from srpo_env.agents.settings import checked
from srpo_env.errors import ContextExceeded, PolicyError
from srpo_env.models import load_tokenizer, resolve_model
from srpo_env.protocols import Sampled, SampleRequest
from srpo_env.records import Output
from srpo_env.registry import load_reference

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OTHERWISE = "*"

Script = Callable[[SampleRequest], "str | Output | Awaitable[str | Output]"]
Table = Sequence[str] | Mapping[str, str]


class ScriptedSettings(BaseModel):
    """The `sample` block of a policy with the backend `scripted`: either `use` or `outputs`.

    Attributes:
        use: `package.module:function` or `./file.py:function`; called with a `SampleRequest`, gives the output.
        outputs: A list, taken in turn, or a table from a part of the last message to the output, `*` standing for all
            other messages.
        model: Its tokenizer gives token ids; without it the outputs have none, and nothing can be trained on them.
        dtype, device, deterministic: What a recipe says of all in-process policies; text needs none of it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    use: str | None = None
    outputs: list[str] | dict[str, str] | None = None
    model: str | None = None
    dtype: str = "float32"
    device: str = "auto"
    deterministic: bool = True

    @model_validator(mode="after")
    def _one_source(self) -> ScriptedSettings:
        if bool(self.use) == bool(self.outputs):
            raise ValueError("give either `use: ./file.py:function` or `outputs:` with at least one output")
        return self


class ScriptedPolicy:
    """A policy that says what it is told to say.

    With a tokenizer its outputs carry token ids and log-probs of 0 (it says them with certainty); without one, text
    alone. Outputs longer than `max_tokens` are cut where there is a tokenizer.

    Example:
        policy = ScriptedPolicy({"2+2": "4", "*": "I don't know"})

    Args:
        outputs: A function of the request, plain or async, that gives text or an `Output`, and may raise `PolicyError`
            or `ContextExceeded`; a list, taken in turn; or a table from a part of the last message to the output, the
            first match counting, `"*"` standing for all other messages.
        name: The policy's label, for messages.
        tokenizer: A tokenizer with a chat template, or the name of a model to take it from.
    """

    in_process = True

    def __init__(
        self,
        outputs: Script | Table,
        *,
        name: str = "main",
        tokenizer: PreTrainedTokenizerBase | str | None = None,
    ) -> None:
        self.name = name
        self.version = 0
        self._script = outputs if callable(outputs) else _script(outputs, name)
        self._tokenizer = tokenizer
        if isinstance(tokenizer, str):
            resolve_model(tokenizer)

    @classmethod
    def from_config(cls, label: str, settings: Mapping[str, Any]) -> ScriptedPolicy:
        """Returns the policy that a recipe describes.

        Args:
            label: The policy's name in the recipe.
            settings: Its `sample` block without `backend`, and its `model` if it has one.

        Raises:
            InvalidRecipe: A key is unknown or a value breaks a rule.
            InvalidInput: `use` can't be imported.
            MissingModel, UnknownName: The model is not there.
        """
        values = checked(ScriptedSettings, f"policies.{label}.sample", settings)
        outputs = values.outputs or load_reference(values.use or "")
        return cls(outputs, name=label, tokenizer=values.model)

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sampled]:
        """Returns one outcome per request, in the same order."""
        return list(await asyncio.gather(*map(self._outcome, requests)))

    async def aclose(self) -> None:
        """Does nothing: there is nothing to free."""

    async def _outcome(self, request: SampleRequest) -> Sampled:
        try:
            said = self._script(request)
            if inspect.isawaitable(said):
                said = await said
            return said if isinstance(said, Output) else self._output(said, request)
        except (PolicyError, ContextExceeded) as error:
            return error

    def _output(self, text: str, request: SampleRequest) -> Output:
        if self._chat is None:
            return Output(text=text, finish_reason="stop", policy_version=self.version)
        ids = self._chat.output_ids(text)
        cut = ids[: request.sampling.max_tokens]
        return Output(
            text=self._chat.text(cut),
            prompt_ids=self._chat.prompt_ids(request.messages, request.earlier),
            output_ids=cut,
            logprobs=(0.0,) * len(cut),
            finish_reason="stop" if cut == ids else "length",
            policy_version=self.version,
        )

    @cached_property
    def _chat(self) -> Chat | None:
        if self._tokenizer is None:
            return None
        return Chat(load_tokenizer(self._tokenizer) if isinstance(self._tokenizer, str) else self._tokenizer)


def _script(outputs: Table, name: str) -> Script:
    """Returns the function that a list or table stands for."""
    if isinstance(outputs, Mapping):
        table = outputs

        def look_up(request: SampleRequest) -> str:
            last = request.messages[-1].content if request.messages else ""
            for part, output in table.items():
                if part != OTHERWISE and part in last:
                    return output
            if OTHERWISE in table:
                return table[OTHERWISE]
            raise PolicyError(
                f"policy {name!r} has no scripted output for {last[:80]!r}; add a part of it to the table, or "
                f"{OTHERWISE!r} for all other messages."
            )

        return look_up
    turn = itertools.cycle(outputs)
    return lambda request: next(turn)
