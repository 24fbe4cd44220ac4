"""Samples an OpenAI-compatible server over HTTP: vLLM, SGLang, llama.cpp, or a hosted one."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import math
import os
import re
import shutil
import tempfile
import time
import weakref
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from pydantic import BaseModel, ConfigDict, Field, field_validator

from srpo_env.agents import completions
from srpo_env.agents.chat import Chat
from srpo_env.agents.http_client import HttpClient, Refused, Replica, Transport, as_json
from srpo_env.agents.limits import output_limit
from srpo_env.agents.local import LocalPolicy
from srpo_env.agents.server_probe import Served, compare_tokenizers, logprobs_mode, served_model
from srpo_env.agents.serving import vllm_commands
from srpo_env.agents.weight_sync import (
    PAUSE,
    Calls,
    Sync,
    adapter_calls,
    checkpoint_calls,
    go_on,
    has_first_weights,
    on_all,
    post,
    publish,
    remove_others,
    write_adapter,
    write_untied,
)
from srpo_env.agents.weight_transfer import Transfer
from srpo_env.config import Lora
from srpo_env.errors import ContextExceeded, InvalidRecipe, MissingExtra, PolicyError
from srpo_env.models import Dtype, load_context_length, load_tokenizer, resolve_model
from srpo_env.portal import on_background_loop, start_on_background_loop
from srpo_env.protocols import RequestKey, Sampled, SampleRequest
from srpo_env.records import Message, Output
from srpo_env.settings import checked

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("srpo_env")

_TOO_LONG = re.compile("context.length|maximum context|prompt is too long", re.IGNORECASE)


class ServerSettings(BaseModel):
    """The `sample` block of a policy with the backend `server`.

    Attributes:
        urls: Addresses of the server's replicas, ending in /v1; the calls of an episode go to the same one.
        model: A transformers folder, a registered name or a hub id: its tokenizer makes the prompts, and it is what is
            trained. Left out: the server gets messages, and its outputs have no token ids.
        served_model: The server's name for the model; left out: the only one that it serves.
        served_dtype: Type of the server's weights, for its command; left out: that of those that are trained.
        api_key_env: The environment variable that holds the key.
        max_in_flight: Most calls at once, over all replicas.
        timeout_s: Longest time of one attempt; waiting for a turn is not part of it.
        attempts: Most attempts for one output.
        template_arguments: Passed on to the chat template, such as `enable_thinking: false`.
        context_length: Most tokens of prompt and output together; left out: what the server says, else the model.
        sync: How new weights reach the server: `checkpoint` and `lora` through a folder, `nccl` from GPU to GPU; left
            out: they don't, and the policy can't be trained.
        sync_folder: A folder that the servers see too; left out: a temporary one, for servers on this machine.
        transport: `aiohttp` carries calls at a tenth of the cost; `httpx` heeds the proxies of the environment.
        dtype: Type of the weights that are trained.
        device: A torch device, or `auto`, for the weights that are trained.
        lora: The adapter that is trained on the model; the recipe says so under `train`.
        seed: Draws its first weights.
        frozen: Whether nothing is trained.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    urls: list[str] = Field(min_length=1)
    model: str | None = None
    served_model: str | None = None
    served_dtype: Dtype | None = None
    api_key_env: str | None = None
    max_in_flight: int = Field(256, ge=1)
    timeout_s: float = Field(600.0, gt=0)
    attempts: int = Field(8, ge=1)
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    context_length: int | None = Field(None, ge=2)
    sync: Sync | None = None
    sync_folder: str | None = None
    transport: Transport = "aiohttp"
    dtype: Dtype = "float32"
    device: str = "auto"
    lora: Lora | None = None
    seed: int = 0
    frozen: bool = False

    @field_validator("urls", mode="before")
    @classmethod
    def _one_or_more(cls, urls: Any) -> Any:
        return [urls] if isinstance(urls, str) else urls


class ServerPolicy:
    """A policy that an OpenAI-compatible server samples.

    With `model`, prompts go out as token ids and the server's own ids and log-probs are kept as sent; such a policy can
    be trained, its weights being in this process and handed over by `sync`. Without it, the server gets messages, and
    its outputs have no ids. All calls are made from the process's background loop, so one policy may be sampled from
    any loop, and from one after the other.

    Example:
        policy = ServerPolicy(["http://127.0.0.1:8001/v1"], model="./my_model")
        outputs = await policy.sample(requests)

    Args:
        urls: See `ServerSettings`, as for all below.
        name: The policy's label, for messages.
        model, served_model, api_key_env, max_in_flight, timeout_s, attempts: See `ServerSettings`.
        template_arguments, context_length, sync, sync_folder, transport: See `ServerSettings`.
        dtype, device, lora, seed, frozen: See `ServerSettings`.

    Raises:
        InvalidRecipe: A setting needs another one, a URL is none or holds a key, or the key's variable is not set.
        MissingModel, UnknownName: The model is not there.
    """

    in_process = False

    def __init__(
        self,
        urls: Sequence[str],
        *,
        name: str = "main",
        model: str | Path | None = None,
        served_model: str | None = None,
        api_key_env: str | None = None,
        max_in_flight: int = 256,
        timeout_s: float = 600.0,
        attempts: int = 8,
        template_arguments: Mapping[str, Any] | None = None,
        context_length: int | None = None,
        sync: Sync | None = None,
        sync_folder: str | Path | None = None,
        transport: Transport = "aiohttp",
        dtype: Dtype = "float32",
        device: str = "auto",
        lora: Lora | None = None,
        seed: int = 0,
        frozen: bool = False,
    ) -> None:
        where = f"policies.{name}.sample"
        if model is None:
            for key, value in (("context_length", context_length), ("sync", sync)):
                if value is not None:
                    raise InvalidRecipe(
                        f"{where}.{key}: {value!r} without a model, whose tokenizer makes ids of the prompts; give the "
                        "policy its `model`."
                    )
        else:
            resolve_model(str(model))
        if sync is not None and (sync == "lora") is (lora is None):
            trains = "no adapter" if lora is None else "an adapter"
            raise InvalidRecipe(
                f"{where}.sync: {sync!r} where the policy trains {trains}; `lora` hands over an adapter (train.lora), "
                "the others all weights."
            )
        if sync == "nccl" and importlib.util.find_spec("vllm") is None:
            raise MissingExtra(
                f"{where}.sync: 'nccl' sends weights by the package 'vllm', which is not installed here: "
                "pip install 'srpo-env[vllm]', or take `sync: checkpoint`."
            )
        self.name = name
        self.version = 0
        self._model_name = None if model is None else str(model)
        self._served_model = served_model
        self._template_arguments = dict(template_arguments or {})
        self._context_length = context_length
        self._sync = sync
        self._sync_folder = None if sync_folder is None else Path(sync_folder)
        self._dtype: Dtype = dtype
        self._device = device
        self._training: dict[str, Any] = {"lora": lora, "seed": seed, "frozen": frozen}
        self._adapter: str | None = None
        self._handed_over = False
        self._last_calls: Calls = {}
        self._seeing_to = asyncio.Lock()
        self._starting: asyncio.Task[Served] | None = None
        self._calls: set[Future[list[Sampled]]] = set()
        self._closed = False
        self._http = HttpClient(
            [_url(url, f"{where}.urls") for url in urls],
            who=name,
            key=_key(api_key_env, f"{where}.api_key_env"),
            max_in_flight=max_in_flight,
            timeout_s=timeout_s,
            attempts=attempts,
            transport=transport,
        )
        self._chat: Chat | None = None
        self._end_id: int | None = None

    @classmethod
    def from_config(cls, label: str, settings: Mapping[str, Any]) -> ServerPolicy:
        """Returns the policy that a recipe describes.

        Args:
            label: The policy's name in the recipe.
            settings: Its `sample` block without `backend`, and its `model` if it has one.

        Raises:
            InvalidRecipe: A key is unknown or a value breaks a rule.
            MissingModel, UnknownName: The model is not there.
        """
        known = dict(checked(ServerSettings, f"policies.{label}.sample", settings))
        del known["served_dtype"]  # the server's own matter
        return cls(name=label, **known)

    @classmethod
    def start_commands(cls, label: str, settings: Mapping[str, Any]) -> list[str]:
        """Returns the commands that start vLLM servers for a policy; none for one without a model."""
        known = checked(ServerSettings, f"policies.{label}.sample", settings)
        if known.model is None:
            return []
        return vllm_commands(
            known.urls,
            known.model,
            dtype=known.served_dtype or known.dtype,
            served_model=known.served_model,
            context_length=known.context_length,
            sync=known.sync,
            lora_rank=None if known.lora is None else known.lora.rank,
            key_variable=known.api_key_env,
        )

    @property
    def model(self) -> PreTrainedModel:
        """The model that is trained; its weights lie in this process and are handed over by `load_weights`.

        Raises:
            InvalidRecipe: Without `sync`, the server would go on with its old weights.
        """
        return self._trained.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with its chat template."""
        return self._trained.tokenizer

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sampled]:
        """Returns one outcome per request, in the same order."""
        if self._closed:
            raise PolicyError(f"policy {self.name!r} is closed; make a new one to sample from.")
        call = start_on_background_loop(partial(self._outcomes, requests))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.wrap_future(call)

    def load_weights(self, source: Path | Mapping[str, torch.Tensor] | None, version: int) -> None:
        """Takes new weights and their version, and hands them to every server.

        Outputs carry the version that the servers had when they were asked for.

        Args:
            source: A transformers folder, a state dict, or None where `model` was changed in place.
            version: The version of the new weights.

        Raises:
            MissingModel: The folder can't be loaded.
            PolicyError: The weights are not those of a model of this shape, or a server did not take them.
        """
        self._trained.load_weights(source, version)
        on_background_loop(self._renew)

    async def aclose(self) -> None:
        """Cancels the calls under way and closes all connections."""
        self._closed = True
        for call in tuple(self._calls):
            call.cancel()
        await asyncio.wrap_future(start_on_background_loop(self._end))

    @cached_property
    def _trained(self) -> LocalPolicy:
        """Holds the weights that are trained; it is never sampled."""
        if self._sync is None or self._model_name is None:
            raise InvalidRecipe(
                f"policies.{self.name}: it has a `train` block, and its server would go on with the weights it began "
                "with. Set sample.sync to lora, checkpoint or nccl and give it a `model`, or leave `train` out."
            )
        return LocalPolicy(self._model_name, name=self.name, dtype=self._dtype, device=self._device, **self._training)

    @cached_property
    def _transfer(self) -> Transfer:
        return Transfer(self._http, self._trained.model, self.name)

    @cached_property
    def _folder(self) -> Path:
        """Where the weights lie that servers load."""
        if self._sync_folder is not None:
            return self._sync_folder.expanduser().resolve()
        made = Path(tempfile.mkdtemp(prefix="srpo_env-weights-"))
        weakref.finalize(self, shutil.rmtree, made, ignore_errors=True)
        return made

    # What follows runs on the background loop.

    async def _end(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        await self._http.aclose()

    async def _outcomes(self, requests: Sequence[SampleRequest]) -> list[Sampled]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._outcome(request)) for request in requests]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _outcome(self, request: SampleRequest) -> Sampled:
        try:
            served = await self._served()
            if self._chat is None:
                attempt = partial(self._chat_attempt, request)
            else:
                prompt = self._chat.prompt_ids(request.messages, request.earlier)
                limit = output_limit(len(prompt), request.sampling.max_tokens, served.context_length, self.name)
                attempt = partial(self._attempt, request, prompt, limit)
            output, attempts = await self._http.call(attempt, home=_home(request.key))
        except Refused as error:
            if error.status == httpx.codes.BAD_REQUEST and _TOO_LONG.search(error.said):
                return ContextExceeded(str(error))
            return error
        except (PolicyError, ContextExceeded) as error:
            return error
        return output.model_copy(update={"attempts": attempts})

    async def _attempt(self, request: SampleRequest, prompt: tuple[int, ...], limit: int, replica: Replica) -> Output:
        assert self._chat is not None
        served = await self._served()
        if self._sync is not None and replica.doubted_until > -math.inf:
            await self._see_to(replica)
        began, version = time.perf_counter(), self.version
        model = self._adapter or served.model
        body = completions.completion_request(model, prompt, request.sampling, limit, request.seed)
        reply = await self._http.send(replica, "POST", f"{replica.url}/completions", body)
        found = completions.read_completion(as_json(reply), prompt, limit)
        return Output(
            text=self._chat.text(_spoken(found.token_ids, self._end_id)),
            prompt_ids=prompt,
            output_ids=tuple(found.token_ids),
            logprobs=tuple(found.logprobs.token_logprobs),
            logprobs_mode=served.logprobs_mode,
            finish_reason=found.finish_reason,
            policy_version=version,
            seconds=time.perf_counter() - began,
        )

    async def _chat_attempt(self, request: SampleRequest, replica: Replica) -> Output:
        served = await self._served()
        began = time.perf_counter()
        body = completions.chat_request(
            served.model, request.messages, request.sampling, request.seed, self._template_arguments
        )
        reply = await self._http.send(replica, "POST", f"{replica.url}/chat/completions", body)
        found = completions.read_chat(as_json(reply))
        return Output(
            text=found.message.content or "",
            finish_reason=found.finish_reason,
            policy_version=self.version,
            seconds=time.perf_counter() - began,
        )

    async def _served(self) -> Served:
        """What the server is, once it has its weights; all who wait share the answer, or the error."""
        if self._starting is None or (self._starting.done() and _failed(self._starting)):
            self._starting = asyncio.create_task(self._start(None))
        return await asyncio.shield(self._starting)

    async def _renew(self) -> None:
        """Hands new weights over; who asks for an output meanwhile waits until they are there."""
        self._starting = asyncio.create_task(self._start(self._starting))
        await asyncio.shield(self._starting)

    async def _start(self, earlier: asyncio.Task[Served] | None) -> Served:
        """Asks what the server is, unless it was asked earlier, and gives it the weights that lie here."""
        if self._model_name is None:
            name = self._served_model or (await served_model(self._http, self.name, None)).id
            return Served(name, 0, "processed")
        if earlier is not None:
            await asyncio.wait((earlier,))
        known = None if earlier is None or _failed(earlier) else earlier.result()
        model, context_length = (known.model, known.context_length) if known else await self._identity(self._model_name)
        if self._sync is not None:
            await self._hand_over()  # at the start, too: who knows what an earlier run left there
        if known:
            return known
        assert self._chat is not None
        prompt = self._chat.prompt_ids((Message(role="user", content="Hello"),))
        return Served(model, context_length, await logprobs_mode(self._http, self.name, model, prompt))

    async def _identity(self, name: str) -> tuple[str, int]:
        """The served model and its context, once its tokenizer is known to be ours."""
        tokenizer = await asyncio.to_thread(load_tokenizer, name)
        self._chat, self._end_id = Chat(tokenizer, self._template_arguments), tokenizer.eos_token_id
        model, context_length = self._served_model, self._context_length
        if model is None or context_length is None:
            found = await served_model(self._http, self.name, self._served_model)
            model, context_length = found.id, context_length or found.max_model_len
        if context_length is None:
            context_length = await asyncio.to_thread(load_context_length, name, tokenizer)
        await compare_tokenizers(self._http, self.name, model, tokenizer)
        return model, context_length

    async def _hand_over(self) -> None:
        """Gives the weights that lie here to every server."""
        trained = self._trained
        version, mark = trained.version, f"{self.name}-{trained.version}"
        if self._handed_over:
            for replica in self._http.replicas:
                if (await self._http.call(partial(has_first_weights, self._http), only=replica, in_turn=False))[0]:
                    self._tell_restart(replica)
        if self._sync == "nccl":
            await self._transfer.send(mark)
        else:
            label = re.sub(r"\W", "_", self.name)
            folder, adapter = self._folder / f"{label}-{version:06d}", f"srpo_env-{self.name}"
            if self._sync == "lora":
                await asyncio.to_thread(publish, folder, lambda new: write_adapter(trained.model, new))
                load = adapter_calls(folder, adapter)
            else:
                write = partial(write_untied, trained.model, trained.tokenizer)
                await asyncio.to_thread(publish, folder, write)
                load = checkpoint_calls(folder)
            self._last_calls = {**PAUSE, **load, **go_on(mark)}
            await on_all(self._http, self._last_calls)
            self._adapter = adapter if self._sync == "lora" else None
            await asyncio.to_thread(remove_others, folder, f"{label}-*")
        self._handed_over, self.version = True, version

    async def _see_to(self, replica: Replica) -> None:
        """Gives the last weights again to a replica that has restarted, which shows in calls to it that fail."""
        async with self._seeing_to:
            if await has_first_weights(self._http, replica):
                self._tell_restart(replica)
                for path, body in self._last_calls.items():
                    await post(self._http, replica, path, body)

    def _tell_restart(self, replica: Replica) -> None:
        said = f"policy {self.name!r}: {replica.url} has restarted since it got the weights of version {self.version}."
        if self._sync == "nccl":
            raise PolicyError(
                f"{said} It is not among those any more that weights are sent to: start all servers anew, then go on "
                "with --resume."
            )
        logger.warning(
            "%s It gets weights again; an output from between may come from those that it began with, whatever its "
            "policy_version says.",
            said,
        )


def _failed(task: asyncio.Task[Served]) -> bool:
    return task.cancelled() or task.exception() is not None


def _spoken(ids: Sequence[int], end_id: int | None) -> Sequence[int]:
    """Token ids without the one that ended them."""
    return ids[:-1] if ids[-1] == end_id else ids


def _home(key: RequestKey) -> int:
    """A number that an episode's requests share, so that one replica keeps its prefix."""
    return zlib.crc32(f"{key.task}/{key.episode}".encode())


def _url(given: str, where: str) -> str:
    """Returns the URL without a slash at its end, and with the path that all such servers have where it has none.

    Messages leave out what may be a key.
    """
    try:
        url = httpx.URL(given.rstrip("/"))
    except httpx.InvalidURL:
        url = httpx.URL("")
    shown = f"{url.scheme}://{url.host}{url.path}"
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidRecipe(f"{where}: one is not a URL such as http://127.0.0.1:8001/v1. Give the server's address.")
    if url.userinfo or url.query or url.fragment:
        raise InvalidRecipe(
            f"{where}: the one to {shown} holds more than an address. A key belongs into an environment variable, "
            "named by `api_key_env`, so that it is never written down."
        )
    return str(url) if url.path not in ("", "/") else f"{str(url).rstrip('/')}/v1"


def _key(variable: str | None, where: str) -> str | None:
    """Returns the key that an environment variable holds; messages leave out a name that may itself be a key."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        shown = f" {variable}" if re.fullmatch("[A-Z][A-Z0-9_]*", variable) else ""
        raise InvalidRecipe(
            f"{where}: the environment variable{shown} is not set, or empty. Give the name of the one that holds the "
            "key."
        )
    return key
