"""How do new weights reach the servers? A shared folder, and the calls by which vLLM takes them from it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from srpo_env.agents.http_client import HttpClient, Refused, Replica
from srpo_env.errors import PolicyError
from srpo_env.models import without_progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Sync = Literal["lora", "checkpoint"]

_FLAGS = {
    "/collective_rpc": "VLLM_SERVER_DEV_MODE=1",
    "/reset_prefix_cache": "VLLM_SERVER_DEV_MODE=1",
    "/v1/load_lora_adapter": "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora (with --max-lora-rank)",
}
"""What vLLM must be started with to know a path."""


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


async def load_checkpoint(http: HttpClient, folder: Path) -> None:
    """Lets every replica load full weights, and forget what it cached with the old ones.

    Raises:
        PolicyError: A replica did not.
    """
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    await _on_all(http, {"/collective_rpc": body, "/reset_prefix_cache": None})


async def load_adapter(http: HttpClient, folder: Path, name: str) -> None:
    """Lets every replica load an adapter in place of the one of this name, and forget what it cached with that.

    Raises:
        PolicyError: A replica did not.
    """
    body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
    await _on_all(http, {"/v1/load_lora_adapter": body, "/reset_prefix_cache": None})


async def _on_all(http: HttpClient, calls: Mapping[str, Any]) -> None:
    """Makes these calls on every replica, one after the other; the replicas side by side."""
    try:
        async with asyncio.TaskGroup() as group:
            for replica in http.replicas:
                group.create_task(_on_one(http, replica, calls))
    except* PolicyError as errors:
        raise errors.exceptions[0] from None


async def _on_one(http: HttpClient, replica: Replica, calls: Mapping[str, Any]) -> None:
    for path, body in calls.items():
        url = replica.url.removesuffix("/v1") + path
        try:
            await http.call(lambda mine, url=url, body=body: http.send(mine, "POST", url, body), only=replica)  # type: ignore[misc]
        except Refused as error:
            raise PolicyError(
                f"{error} The weights were not handed over: the server must be vLLM, started with {_FLAGS[path]}, and "
                f"read the folder of `sync_folder` under the same path."
            ) from None
        except PolicyError as error:
            raise PolicyError(f"{error} The weights were not handed over.") from None
