"""Samples a transformers model in this process."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from srpo_env.adapters import (
    adapter_weights,
    add_adapter,
    has_adapter,
    is_adapter,
    model_below,
    read_adapter,
    set_adapter_weights,
    transformer,
)
from srpo_env.agents.calls import Call, Calls
from srpo_env.agents.chat import Chat
from srpo_env.agents.limits import output_limit
from srpo_env.config import Lora
from srpo_env.errors import ContextExceeded, PolicyError
from srpo_env.models import Dtype, LoadedModel, load_model, load_shared, load_tokenizer, outline, resolve_model
from srpo_env.protocols import Sampled, SampleRequest
from srpo_env.records import Message, Output
from srpo_env.settings import checked

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from srpo_env.agents.generation import Generator, Row


class LocalSettings(BaseModel):
    """The `sample` block of a policy with the backend `local`.

    Attributes:
        model: A transformers folder, a registered name or a hub id.
        dtype: Type of the weights.
        device: A torch device, or `auto`.
        template_arguments: Passed on to the chat template, such as `enable_thinking: false`.
        deterministic: Each call is a batch of its own, so that equal calls give equal outputs; otherwise calls share
            one running batch, which is faster.
        max_rows: Most rows sampled together.
        cache_gib: Most memory for their keys and values, in GiB.
        lora: The adapter that is trained on the model; the recipe says so under `train`.
        seed: Draws its first weights.
        frozen: Whether nothing is trained, so that the weights can be those below others' adapters.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    dtype: Dtype = "float32"
    device: str = "auto"
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    deterministic: bool = True
    max_rows: int = Field(1024, ge=1)
    cache_gib: float = Field(4.0, gt=0)
    lora: Lora | None = None
    seed: int = 0
    frozen: bool = False


class LocalPolicy:
    """A policy whose model lives in this process; the learner trains the very model that is sampled.

    The model is loaded when it is first needed. Sampling runs in a thread of the policy's own; cancelling a call, or
    closing the policy, stops it within one decoding step.

    Example:
        policy = LocalPolicy("./my_model")
        outputs = await policy.sample(requests)

    Args:
        model: A transformers folder, a registered name or a hub id; or the folder of an adapter.
        name: The policy's label, for messages.
        dtype, device, template_arguments, deterministic, max_rows, cache_gib, lora, seed, frozen: See `LocalSettings`.

    Raises:
        MissingModel, UnknownName: The model is not there.
    """

    in_process = True

    def __init__(
        self,
        model: str | Path,
        *,
        name: str = "main",
        dtype: Dtype = "float32",
        device: str = "auto",
        template_arguments: Mapping[str, Any] | None = None,
        deterministic: bool = True,
        max_rows: int = 1024,
        cache_gib: float = 4.0,
        lora: Lora | None = None,
        seed: int = 0,
        frozen: bool = False,
    ) -> None:
        resolve_model(str(model))
        self.name = name
        self.version = 0
        self._model_name = str(model)
        self._dtype: Dtype = dtype
        self._device = device
        self._template_arguments = dict(template_arguments or {})
        self._max_rows = max_rows
        self._cache_bytes = int(cache_gib * 2**30)
        self._lora = lora
        self._seed = seed
        self._frozen = frozen
        self._loading = threading.Lock()
        self._stepping = threading.Lock()
        self._calls = Calls(
            name,
            enter=self._enter,
            step=self._step,
            drop=self._drop,
            clear=self._clear,
            one_at_a_time=deterministic,
        )

    @classmethod
    def from_config(cls, label: str, settings: Mapping[str, Any]) -> LocalPolicy:
        """Returns the policy that a recipe describes.

        Args:
            label: The policy's name in the recipe.
            settings: Its `sample` block without `backend`, and its `model`.

        Raises:
            InvalidRecipe: A key is unknown or a value breaks a rule.
            MissingModel, UnknownName: The model is not there.
        """
        return cls(name=label, **dict(checked(LocalSettings, f"policies.{label}.sample", settings)))

    @classmethod
    def cache_bytes(
        cls, label: str, settings: Mapping[str, Any], prompt: Sequence[Message], max_tokens: int, rows: int
    ) -> int:
        """Returns the most bytes of keys and values of so many outputs at once; loads the tokenizer and the config.

        Args:
            label: The policy's name in the recipe.
            settings: As for `from_config`.
            prompt: One that is as long as most.
            max_tokens: Longest output.
            rows: Outputs that may be sampled at once.
        """
        from srpo_env.agents.generation import most_tokens

        known = checked(LocalSettings, f"policies.{label}.sample", settings)
        chat = Chat(load_tokenizer(known.model), known.template_arguments)
        model = outline(known.model, known.dtype)
        config: Any = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token: int = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
        slots, prefill = most_tokens(min(rows, known.max_rows), len(chat.prompt_ids(prompt)), max_tokens)
        return min(int(known.cache_gib * 2**30), slots * per_token) + prefill * per_token

    @property
    def model(self) -> PreTrainedModel:
        """The model; sampler and learner share it. With `lora` it is a `peft.PeftModel`."""
        return self._loaded.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with its chat template."""
        return self._loaded.tokenizer

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sampled]:
        """Returns one outcome per request, in the same order."""
        return await self._calls.outcomes(requests)

    def load_weights(self, source: Path | Mapping[str, torch.Tensor] | None, version: int) -> None:
        """Takes new weights and their version; waits for a decoding step that is under way.

        Args:
            source: A transformers folder, a state dict, or None where `model` was changed in place; with `lora`, the
                folder or the weights of an adapter.
            version: The version of the new weights.

        Raises:
            MissingModel: The folder can't be loaded.
            PolicyError: The weights are not those of a model of this shape; nothing changed.
        """
        if isinstance(source, Path):
            adapter = is_adapter(source)
            source = read_adapter(source) if adapter else load_model(str(source), self._dtype, "cpu").model.state_dict()
        with self._stepping:
            if source is not None:
                self._copy(source, self.model)
            self.version = version

    async def aclose(self) -> None:
        """Cancels the calls under way and frees the cache."""
        await self._calls.close()
        self._clear()
        self.__dict__.pop("_generator", None)

    @property
    def _loaded(self) -> LoadedModel:
        with self._loading:
            return self._load

    @cached_property
    def _load(self) -> LoadedModel:
        start = resolve_model(self._model_name)
        adapter = start if isinstance(start, Path) and is_adapter(start) else None
        if self._lora is None:
            return (load_shared if self._frozen and not adapter else load_model)(
                self._model_name, self._dtype, self._device
            )
        below = load_shared(model_below(adapter) if adapter else self._model_name, self._dtype, self._device)
        loaded = replace(below, model=add_adapter(below.model, self._lora, self._seed), below=below)
        if adapter:
            self._copy(read_adapter(adapter), loaded.model)
        return loaded

    @cached_property
    def _chat(self) -> Chat:
        return Chat(self.tokenizer, self._template_arguments)

    @cached_property
    def _generator(self) -> Generator:
        from srpo_env.agents.generation import Generator

        return Generator(
            transformer(self.model),
            self._loaded.stop_ids,
            self._chat.text,
            max_rows=self._max_rows,
            cache_bytes=self._cache_bytes,
            interrupted=lambda: self._calls.abandoned,
        )

    def _copy(self, state: Mapping[str, torch.Tensor], model: PreTrainedModel) -> None:
        adapted = has_adapter(model)
        own = adapter_weights(model) if adapted else model.state_dict()
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        unknown = sorted(state.keys() - own.keys())
        missing = sorted(own.keys() - state.keys() - tied)
        reshaped = sorted(key for key in own.keys() & state.keys() if own[key].shape != state[key].shape)
        if unknown or missing or reshaped:
            key = (unknown or missing or reshaped)[0]
            problem = "is not in the model" if unknown else "is missing" if missing else "has another shape"
            raise PolicyError(
                f"policy {self.name!r}: the new weights are not those of {self._model_name!r}"
                f"{' with this adapter' * adapted}: {key!r} {problem} "
                f"({len(unknown) + len(missing) + len(reshaped)} such). Give weights of the same architecture."
            )
        if adapted:
            set_adapter_weights(model, state)
        else:
            model.load_state_dict(state, strict=False)

    # What follows runs in the sampling thread.

    def _enter(self, call: Call) -> None:
        """Puts the rows of a call into the batch."""
        from srpo_env.agents.generation import Row

        context = self._loaded.context_length
        for index, request in enumerate(call.requests):
            try:
                prompt = self._chat.prompt_ids(request.messages, request.earlier)
                limit = output_limit(len(prompt), request.sampling.max_tokens, context, self.name)
            except (PolicyError, ContextExceeded) as error:
                call.ready[index] = error
                continue
            owner = (call, index)
            self._generator.add([Row(prompt, request.sampling, limit, request.seed, owner, began=call.began)])

    def _step(self) -> None:
        """Makes one decoding step, unless no row needs one."""
        from srpo_env.agents.generation import Interrupted

        if "_generator" not in self.__dict__ or not self._generator.busy:
            return
        try:
            with self._stepping:
                self._generator.version = self.version
                done = self._generator.step()
        except Interrupted:
            self._generator.clear()
            self._calls.cancel_all()
            return
        for row, output in zip(done, self._outputs(done), strict=True):
            call, index = row.owner
            call.ready[index] = output

    def _drop(self, calls: Sequence[Call]) -> None:
        if "_generator" in self.__dict__:
            self._generator.drop(lambda row: row.owner[0] in calls)

    def _clear(self) -> None:
        if "_generator" in self.__dict__:
            self._generator.clear()

    def _outputs(self, rows: Sequence[Row]) -> list[Sampled]:
        stops = self._generator.stop_ids
        spoken = [row.output[:-1] if row.output and row.output[-1] in stops else row.output for row in rows]
        return [
            PolicyError(f"policy {self.name!r} gave logits that are not finite; its weights have diverged.")
            if row.broken
            else Output(
                text=text,
                prompt_ids=row.prompt,
                output_ids=tuple(row.output),
                logprobs=tuple(row.logprobs),
                logprobs_mode="processed",
                finish_reason=row.finish_reason,
                policy_version=row.version,
                seconds=row.seconds,
            )
            for row, text in zip(rows, self._chat.texts(spoken), strict=True)
        ]
