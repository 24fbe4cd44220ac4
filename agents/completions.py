"""What is asked of an OpenAI-compatible server, and what must its reply hold to be an output?

Prompts go out as token ids, and ids and log-probs come back as the server sampled them, so nothing is re-tokenised. A
server that takes no ids is asked for chat completions, which give text alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from srpo_env.agents.http_client import FailedAttempt
from srpo_env.records import FinishReason, Message, Sampling

_MODE_BAND = 0.05
"""Two log-probs this near are the same: what serving noise moves them by, and far less than a temperature does."""

LogProb = Annotated[float, Field(le=0, allow_inf_nan=False)]


class _Reply(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


Reply = TypeVar("Reply", bound=_Reply)


class _Logprobs(_Reply):
    token_logprobs: list[LogProb]


class Completion(_Reply):
    """A choice of /completions, whole: one log-prob for each token, and a reason why it ended."""

    text: str
    token_ids: list[int] = Field(min_length=1)
    prompt_token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: FinishReason


class _ChatMessage(_Reply):
    content: str | None


class ChatCompletion(_Reply):
    """A choice of /chat/completions."""

    message: _ChatMessage
    finish_reason: FinishReason


class _TopLogprobs(_Reply):
    top_logprobs: list[dict[str, float]] = Field(min_length=1)


class _Top(_Reply):
    logprobs: _TopLogprobs


class ServedModel(_Reply):
    """An entry of /models; `parent` is set for adapters, `max_model_len` by vLLM and SGLang."""

    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Models(_Reply):
    data: list[ServedModel]


def completion_request(
    model: str, prompt: Sequence[int], sampling: Sampling, max_tokens: int, seed: int
) -> dict[str, Any]:
    """Returns the body for /completions.

    It names every setting that changes the distribution: what is left out, servers take from the model's own
    generation config, and log-probs would not be those that the learner computes.
    """
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed,
        "logprobs": 0,
        "return_token_ids": True,
        **({"stop": list(sampling.stop)} if sampling.stop else {}),
    }


def chat_request(
    model: str, messages: Sequence[Message], sampling: Sampling, seed: int, template_arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the body for /chat/completions; of what only some servers know, it names what was asked for."""
    return {
        "model": model,
        "messages": [{"role": message.role, "content": message.content} for message in messages],
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": seed,
        **({"top_k": sampling.top_k} if sampling.top_k else {}),
        **({"stop": list(sampling.stop)} if sampling.stop else {}),
        **({"chat_template_kwargs": dict(template_arguments)} if template_arguments else {}),
    }


def probe_request(model: str, prompt: Sequence[int], temperature: float) -> dict[str, Any]:
    """Returns the body for one token at a temperature, with the most likely one's log-prob."""
    return {
        **completion_request(model, prompt, Sampling(temperature=temperature), max_tokens=1, seed=0),
        "logprobs": 1,
    }


def tokenize_request(model: str, text: str) -> dict[str, Any]:
    """Returns the body for /tokenize, as vLLM and SGLang want it and, under other names, llama.cpp."""
    return {"model": model, "prompt": text, "add_special_tokens": False, "content": text, "add_special": False}


def read_completion(data: Any, prompt: Sequence[int], max_tokens: int) -> Completion:
    """Reads a reply of /completions.

    Args:
        data: The reply.
        prompt: The ids that were sent.
        max_tokens: Most tokens that were asked for.

    Raises:
        FailedAttempt: It is not one whole output to that prompt.
    """
    found = _only_choice(Completion, data)
    if found.prompt_token_ids != list(prompt):
        raise FailedAttempt("the reply's prompt_token_ids are not the ids that were sent.")
    tokens, logprobs = len(found.token_ids), len(found.logprobs.token_logprobs)
    if tokens != logprobs or tokens > max_tokens:
        raise FailedAttempt(f"the reply has {tokens} token ids and {logprobs} log-probs, at most {max_tokens} asked.")
    return found


def read_chat(data: Any) -> ChatCompletion:
    """Reads a reply of /chat/completions.

    Raises:
        FailedAttempt: It is not one whole output.
    """
    return _only_choice(ChatCompletion, data)


def read_top_logprob(data: Any) -> float:
    """Reads the log-prob of the most likely first token.

    Raises:
        FailedAttempt: The reply has none.
    """
    return max(_only_choice(_Top, data).logprobs.top_logprobs[0].values())


def read_tokens(data: Any) -> list[int] | None:
    """Reads a reply of /tokenize; None where it holds no ids."""
    tokens = data.get("tokens") if isinstance(data, Mapping) else None
    return tokens if isinstance(tokens, list) and all(isinstance(each, int) for each in tokens) else None


def read_models(data: Any) -> list[ServedModel]:
    """Reads a reply of /models.

    Raises:
        FailedAttempt: It is not a list of models.
    """
    return _checked(_Models, data).data


def depends_on_temperature(top_logprobs: Sequence[float]) -> bool:
    """Whether log-probs of the same token at different temperatures differ, as those of the sampled distribution do."""
    return max(top_logprobs) - min(top_logprobs) > _MODE_BAND


def _only_choice(kind: type[Reply], data: Any) -> Reply:
    choices = data.get("choices") if isinstance(data, Mapping) else None
    if not isinstance(choices, list) or len(choices) != 1:
        raise FailedAttempt("the reply has no `choices` with exactly one choice.")
    return _checked(kind, choices[0])


def _checked(kind: type[Reply], data: Any) -> Reply:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        key = ".".join(map(str, problem["loc"]))
        remedy = (
            " If this server never gives token ids, leave the policy's `model` out: it is then asked for chat "
            "completions, whose outputs can be logged and evaluated, and not be trained on."
        )
        raise FailedAttempt(
            f"the reply is not whole: {key}: {problem['msg']}.{remedy if key.endswith('token_ids') else ''}"
        ) from None
