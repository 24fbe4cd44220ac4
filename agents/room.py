"""How long may an output be? What the prompt leaves of the context."""

from __future__ import annotations

from collections.abc import Sequence

from srpo_env.errors import ContextExceeded, PolicyError


def room(prompt: Sequence[int], max_tokens: int, context: int, policy: str) -> int:
    """Returns how many tokens the output may have.

    Args:
        prompt: Token ids.
        max_tokens: What the sampling settings allow.
        context: Most tokens of prompt and output together.
        policy: The policy's label, for messages.

    Raises:
        PolicyError: The prompt is empty.
        ContextExceeded: The prompt leaves no room.

    Example:
        >>> room([5, 6, 7], max_tokens=8, context=10, policy="main")
        7
    """
    if not prompt:
        raise PolicyError("the chat template makes an empty prompt of these messages; write a prompt.")
    if len(prompt) >= context:
        raise ContextExceeded(
            f"a prompt of {len(prompt)} tokens leaves no room for an output in the context of {context} tokens of "
            f"policy {policy!r}; shorten what the agent sees or take a model with a longer context."
        )
    return min(max_tokens, context - len(prompt))
