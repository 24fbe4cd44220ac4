"""What is the server, and does it fit the policy? Asked before the first output."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from srpo_env.agents import completions
from srpo_env.agents.http_client import HttpClient, Refused, Replica, as_json
from srpo_env.agents.weight_sync import root
from srpo_env.errors import PolicyError
from srpo_env.records import LogprobsMode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("srpo_env")

_PROBE_TEMPERATURES = (1.0, 2.0)
_PROBE_TEXT = "naïve façade – 42 🚲  two\n\tA1"
"""What converted tokenizers get wrong: accents, dashes, digits, characters of four bytes, white space."""


@dataclass(frozen=True, slots=True)
class Served:
    """What is known of the server once it has been asked."""

    model: str
    context_length: int
    logprobs_mode: LogprobsMode


async def served_model(http: HttpClient, policy: str, name: str | None) -> completions.ServedModel:
    """Returns the entry of /models for the policy's model.

    Args:
        http: Calls the replicas.
        policy: The policy's label, for messages.
        name: The server's name for it; None: the only one that it serves.

    Raises:
        PolicyError: No name, and not one model.
    """

    async def attempt(replica: Replica) -> list[completions.ServedModel]:
        return completions.read_models(as_json(await http.send(replica, "GET", f"{replica.url}/models")))

    models, _ = await http.call(attempt, in_turn=False)
    if name is not None:
        named = [each for each in models if each.id == name]
        return named[0] if named else completions.ServedModel(id=name)
    bases = [each for each in models if each.parent is None]
    if len(bases) == 1:
        return bases[0]
    names = ", ".join(each.id for each in bases[:20]) or "none"
    raise PolicyError(f"policy {policy!r}: the server has {len(bases)} models ({names}); name one as `served_model`.")


async def compare_tokenizers(http: HttpClient, policy: str, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Lets the server encode a text, where it can; ids that it reads otherwise than we mean them would go unnoticed.

    Args:
        http, policy: See `served_model`.
        model: The server's name for the model.
        tokenizer: What makes the policy's ids.

    Raises:
        PolicyError: It makes other ids of the text than `tokenizer`.
    """
    text = _PROBE_TEXT + "".join(tokenizer.all_special_tokens)

    async def attempt(replica: Replica) -> tuple[str, list[int] | None]:
        url = f"{root(replica)}/tokenize"
        reply = await http.send(replica, "POST", url, completions.tokenize_request(model, text))
        return url, completions.read_tokens(as_json(reply))

    try:
        (url, theirs), _ = await http.call(attempt, in_turn=False)
    except Refused as error:
        url, theirs = str(error), None
    ours = tokenizer.encode(text, add_special_tokens=False)
    if theirs is None:
        logger.info("policy %r: the server's tokenizer was not compared with the model's: %s", policy, url)
    elif theirs != ours:
        raise PolicyError(
            f"policy {policy!r}: {url} makes other ids of {text!r} than the tokenizer of the policy's `model`: "
            f"{theirs} there, {ours} here. What one says is not what the other reads: let the server serve that model "
            "with its own tokenizer."
        )


async def logprobs_mode(http: HttpClient, policy: str, model: str, prompt: Sequence[int]) -> LogprobsMode:
    """Tries whether log-probs are of the distribution that is sampled: then they change with the temperature.

    Args:
        http, policy, model: See `compare_tokenizers`.
        prompt: Any prompt.
    """

    async def attempt(temperature: float, replica: Replica) -> float:
        body = completions.probe_request(model, prompt, temperature)
        reply = as_json(await http.send(replica, "POST", f"{replica.url}/completions", body))
        completions.read_completion(reply, prompt, 1)
        return completions.read_top_logprob(reply)

    tops = [(await http.call(partial(attempt, each), in_turn=False))[0] for each in _PROBE_TEMPERATURES]
    if completions.depends_on_temperature(tops):
        return "processed"
    logger.warning(
        "policy %r: the server's log-probs are from before the temperature, so they are used only at temperature "
        "1. Start vLLM with --logprobs-mode processed_logprobs.",
        policy,
    )
    return "raw"
