"""How is a vLLM server started so that a policy of the backend `server` can use it?"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from urllib.parse import urlsplit

from srpo_env.agents.weight_sync import Sync
from srpo_env.models import resolve_model

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM 0.32 takes for --max-lora-rank."""


def vllm_commands(
    urls: Sequence[str],
    model: str,
    *,
    dtype: str = "auto",
    served_model: str | None = None,
    context_length: int | None = None,
    sync: Sync | None = None,
    lora_rank: int | None = None,
    key_variable: str | None = None,
) -> list[str]:
    """Returns the command line of each server, to be typed into a shell on the server's machine.

    What is behind https is someone else's, or behind a proxy: it gets no line.

    Args:
        urls: Addresses of the replicas; host and port are where the server listens.
        model: A transformers folder, a registered name or a hub id.
        dtype: Type of the weights.
        served_model: The name that the policy asks for; None: vLLM's own.
        context_length: Most tokens of prompt and output together; None: the model's.
        sync: How new weights reach the server; None: they don't.
        lora_rank: Rank of the adapters that are handed over, for `lora`.
        key_variable: The environment variable that holds the server's key; the key itself is not looked at.

    Example:
        >>> print(*vllm_commands(["http://127.0.0.1:8001/v1"], "org/name", dtype="bfloat16", sync="checkpoint"))
        VLLM_SERVER_DEV_MODE=1 vllm serve org/name --host 127.0.0.1 --port 8001 --dtype bfloat16 \
--logprobs-mode processed_logprobs
    """
    environment = {
        None: "",
        # Paths by which weights are reloaded and caches emptied; such a server must not be open to the world.
        "checkpoint": "VLLM_SERVER_DEV_MODE=1 ",
        "nccl": "VLLM_SERVER_DEV_MODE=1 ",
        "lora": "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 ",
    }[sync]
    common = vllm_arguments(
        dtype=dtype,
        served_model=served_model,
        context_length=context_length,
        lora_rank=(lora_rank or _RANKS[2]) if sync == "lora" else None,
        transfer=sync == "nccl",
    )
    key = f' --api-key "${key_variable}"' if key_variable else ""
    lines = []
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme == "https":
            continue
        place = ["--host", str(parts.hostname), "--port", str(parts.port or 80)]
        lines.append(f"{environment}{shlex.join(['vllm', 'serve', str(resolve_model(model)), *place, *common])}{key}")
    return lines


def vllm_arguments(
    *,
    dtype: str,
    served_model: str | None = None,
    context_length: int | None = None,
    lora_rank: int | None = None,
    transfer: bool = False,
) -> list[str]:
    """Returns the arguments that all replicas share; without them log-probs would be those from before the temperature.

    Args:
        dtype, served_model, context_length: See `vllm_commands`.
        lora_rank: Rank of the adapters; None: the server takes none.
        transfer: Whether its GPUs take weights from the learner's.
    """
    arguments = ["--dtype", dtype, "--logprobs-mode", "processed_logprobs"]
    if served_model is not None:
        arguments += ["--served-model-name", served_model]
    if context_length is not None:
        arguments += ["--max-model-len", str(context_length)]
    if lora_rank is not None:
        arguments += ["--enable-lora", "--max-lora-rank", str(adapter_room(lora_rank)), "--max-loras", "1"]
    if transfer:
        arguments += ["--weight-transfer-config", '{"backend": "nccl"}']
    return arguments


def adapter_room(rank: int) -> int:
    """Returns the smallest of vLLM's sizes that an adapter of this rank fits into.

    >>> adapter_room(20)
    32
    """
    return next((size for size in _RANKS if size >= rank), rank)
