"""How do new weights reach the servers? What is written or sent, and the calls by which vLLM takes it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from srpo_env.agents.http_client import HttpClient, Refused, Replica, as_json
from srpo_env.errors import PolicyError
from srpo_env.models import without_progress_bar

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Sync = Literal["lora", "checkpoint", "nccl"]
Calls = Mapping[str, Any]
"""Paths, in the order in which they are called, with the body of each."""

PAUSE: Calls = {"/pause?mode=wait": None}
"""Lets outputs under way end with the weights that they began with; others wait at the server."""

_SEEN = ", and see the folder of `sync_folder` under the same path"
_NEEDS = {
    "/collective_rpc": f"VLLM_SERVER_DEV_MODE=1{_SEEN}",
    "/v1/load_lora_adapter": f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora (with --max-lora-rank){_SEEN}",
}
"""What vLLM must be started with to know a path, where it is more than the developers' mode."""

_FIRST_WEIGHTS = "default"
"""What vLLM calls the weights that it began with."""


def write_untied(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes a model as a transformers folder whose output layer has weights of its own.

    A server that loads new weights over a tied pair would leave its output layer as it was.
    """
    state = dict(model.state_dict())
    for name in getattr(model, "all_tied_weights_keys", None) or ():
        state[name] = state[name].clone()
    with without_progress_bar():
        model.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)
    config = folder / "config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**values, "tie_word_embeddings": False}, indent=2), encoding="utf-8")


def write_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Writes the adapter of a `peft.PeftModel`."""
    # The embeddings are no part of it; peft would ask a hub whether the vocabulary has grown.
    model.save_pretrained(folder, save_embedding_layers=False)


def publish(folder: Path, write: Callable[[Path], None]) -> None:
    """Lets `write` fill a folder, which appears whole or not at all."""
    unfinished = folder.with_name(f".writing-{folder.name}")
    for stale in (unfinished, folder):
        shutil.rmtree(stale, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        write(unfinished)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def remove_others(folder: Path, pattern: str) -> None:
    """Removes the folders beside this one whose names match."""
    for other in folder.parent.glob(pattern):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights by the names of the model's files, a tied output layer too: vLLM has a copy of its own."""
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    yield from revert_weight_conversion(model, state).items()


def checkpoint_calls(folder: Path) -> Calls:
    """The call by which vLLM loads full weights from a folder."""
    return {"/collective_rpc": {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}}


def adapter_calls(folder: Path, name: str) -> Calls:
    """The call by which vLLM loads an adapter in place of the one of this name."""
    return {"/v1/load_lora_adapter": {"lora_name": name, "lora_path": str(folder), "load_inplace": True}}


def go_on(version: str) -> Calls:
    """The calls after which a server samples its new weights: what it cached with the old ones is forgotten."""
    return {"/reset_prefix_cache": None, "/update_weight_version": {"new_version": version}, "/resume": None}


async def on_all(http: HttpClient, calls: Calls) -> None:
    """Makes these calls on every replica, one after the other; the replicas side by side.

    Raises:
        PolicyError: A replica did not do what it was asked for.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for replica in http.replicas:
                group.create_task(_on_one(http, replica, calls))
    except* PolicyError as errors:
        raise errors.exceptions[0] from None


async def _on_one(http: HttpClient, replica: Replica, calls: Calls) -> None:
    for path, body in calls.items():
        try:
            await http.call(partial(post, http, path=path, body=body), only=replica, in_turn=False)
        except PolicyError as error:
            raise PolicyError(f"{error} {remedy(path, error)}") from None


async def post(http: HttpClient, replica: Replica, path: str, body: Any) -> None:
    """Makes one call once, at a path beside /v1.

    Raises:
        FailedAttempt, Refused: As `HttpClient.send`.
    """
    await http.send(replica, "POST", root(replica) + path, body)


def remedy(path: str, error: Exception) -> str:
    """What to do where a replica did not take a call."""
    if not isinstance(error, Refused):
        return "The weights were not handed over."
    return (
        "The weights were not handed over: the server must be vLLM 0.32 or newer, started with "
        f"{_NEEDS.get(path, 'VLLM_SERVER_DEV_MODE=1')}."
    )


async def has_first_weights(http: HttpClient, replica: Replica) -> bool:
    """Whether a replica has the weights that it began with: so it is after a restart.

    Raises:
        FailedAttempt, Refused: As `HttpClient.send`.
    """
    said = as_json(await http.send(replica, "GET", root(replica) + "/weight_info"))
    return isinstance(said, Mapping) and said.get("weight_version") == _FIRST_WEIGHTS


def root(replica: Replica) -> str:
    """The address of a replica without /v1, beside which its other paths lie."""
    return replica.url.removesuffix("/v1")
