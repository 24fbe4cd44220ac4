"""What the wings implement: policy, trainable policy, resting policy, served backend, tool, trainer.

The core finds implementations by entry point and imports none of them; these protocols are where the wings meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from srpo_env.errors import ContextExceeded, PolicyError
from srpo_env.records import Message, Output, Sampling

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from srpo_env.batch import EventBatch
    from srpo_env.config import PolicyTraining


class RequestKey(NamedTuple):
    """Where a request comes from; its order is the order in which deterministic batches are formed."""

    task: int
    episode: int
    step: int
    member: int


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One output to be sampled.

    Attributes:
        messages: The chat, rendered by the policy's own template.
        sampling: Settings of this row.
        seed: Decides this row's randomness, whatever else is in the batch.
        key: Where the request comes from.
        earlier: The member's last output, where `messages` go on from it: its last assistant message is that output.
            A policy appends to its ids where the chat template allows it, and never encodes its text again.
    """

    messages: tuple[Message, ...]
    sampling: Sampling
    seed: int
    key: RequestKey
    earlier: Output | None = None


Sampled = Output | ContextExceeded | PolicyError
"""What became of one request."""


@runtime_checkable
class Policy(Protocol):
    """A set of weights and the way to sample it."""

    @property
    def version(self) -> int:
        """Number of weight updates that the sampling weights have seen."""
        ...

    @property
    def in_process(self) -> bool:
        """Whether sampling runs in this process, so that waiting for a full batch pays."""
        ...

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sampled]:
        """Returns one outcome per request, in the same order.

        A row that fails does not fail its neighbours: its outcome is the error itself, `ContextExceeded` where the
        prompt leaves no room, `PolicyError` where no output could be had after all attempts.
        """
        ...

    async def aclose(self) -> None:
        """Frees what the policy holds."""
        ...


@runtime_checkable
class Trainable(Protocol):
    """A policy whose weights a trainer may change in this process."""

    @property
    def model(self) -> PreTrainedModel:
        """The model; sampler and learner share it."""
        ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with its chat template."""
        ...

    def load_weights(self, source: Path | Mapping[str, torch.Tensor] | None, version: int) -> None:
        """Takes new weights and their version.

        Args:
            source: A transformers folder, a state dict, or None where the learner changed `model` in place.
            version: The version of the new weights.
        """
        ...


@runtime_checkable
class Resting(Protocol):
    """A policy that can leave the accelerator's memory to a learner in the same process."""

    def rest(self) -> None:
        """Gives memory back until it is needed: the next call of `sample` or `load_weights` takes it by itself."""
        ...


@runtime_checkable
class Served(Protocol):
    """A backend whose servers are started by hand."""

    @classmethod
    def start_commands(cls, label: str, settings: Mapping[str, Any]) -> list[str]:
        """Returns the shell commands that start the servers of a policy; asks none of them.

        Args:
            label: The policy's name in the recipe.
            settings: As for the backend's `from_config`.
        """
        ...


@runtime_checkable
class Caching(Protocol):
    """A backend that keeps keys and values in this process."""

    @classmethod
    def cache_bytes(
        cls, label: str, settings: Mapping[str, Any], prompt: Sequence[Message], max_tokens: int, rows: int
    ) -> int:
        """Returns the most bytes that it keeps of so many outputs at once; loads no weights.

        Args:
            label: The policy's name in the recipe.
            settings: As for the backend's `from_config`.
            prompt: One that is as long as most.
            max_tokens: Longest output.
            rows: Outputs that may be sampled at once.
        """
        ...


@runtime_checkable
class Estimating(Protocol):
    """A trainer that says beforehand how much memory it takes."""

    @classmethod
    def memory(cls, settings: Any, model: PreTrainedModel, training: PolicyTraining) -> dict[str, int]:
        """Returns the bytes of each part, beside the weights of a policy.

        Args:
            settings: As from its `settings`.
            model: The policy's, without data (`srpo_env.models.outline`).
            training: How the policy is trained.
        """
        ...


@runtime_checkable
class Tool(Protocol):
    """Something an agent may call."""

    @property
    def name(self) -> str:
        """The name that agents call it by."""
        ...

    @property
    def description(self) -> str:
        """One sentence for the prompt."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON Schema of the arguments, an object."""
        ...

    async def __call__(self, **arguments: Any) -> str:
        """Returns the result as text; raises `ToolError` for what the agent did wrong."""
        ...


@runtime_checkable
class Trainer(Protocol):
    """Learns from events. The `learner` section of a recipe is its settings.

    A class may name, in `preset_keys`, the settings that an override of `learner.preset` drops from a recipe's file.
    """

    @classmethod
    def settings(cls, values: Mapping[str, Any]) -> BaseModel:
        """Checks the `learner` section and returns it complete with defaults.

        Raises:
            InvalidRecipe: A key is unknown or a value breaks a rule.
        """
        ...

    def update(self, batch: EventBatch) -> dict[str, float]:
        """Learns from one batch and returns its metrics, NaN where one does not apply."""
        ...

    def save(self, folder: Path) -> None:
        """Writes what is needed to go on: weights in transformers format, optimiser, randomness."""
        ...

    def load(self, folder: Path) -> None:
        """Takes up what `save` wrote."""
        ...
