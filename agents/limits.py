"""How long may an output be?"""

from __future__ import annotations

from srpo_env.errors import ContextExceeded, PolicyError


def output_limit(prompt_tokens: int, max_tokens: int, context_length: int, policy: str) -> int:
    """Returns how many tokens the output may have: `max_tokens`, or what the prompt leaves of the context.

    Args:
        prompt_tokens: Length of the prompt.
        max_tokens: What the sampling settings allow.
        context_length: Most tokens of prompt and output together.
        policy: The policy's label, for messages.

    Raises:
        ContextExceeded: The prompt leaves no room.
        PolicyError: The prompt is empty.
    """
    if not prompt_tokens:
        raise PolicyError("the chat template makes an empty prompt of these messages; write a prompt.")
    if prompt_tokens >= context_length:
        raise ContextExceeded(
            f"a prompt of {prompt_tokens} tokens leaves no room for an output in the context of {context_length} "
            f"tokens of policy {policy!r}; shorten what the agent sees or take a model with a longer context."
        )
    return min(max_tokens, context_length - prompt_tokens)
