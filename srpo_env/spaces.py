"""Gymnasium spaces for text: any text, a name out of a list, an active set.

Gymnasium's own `Text` holds neither an empty text nor most characters, and has a length; these hold what models say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Space

from srpo_env.records import Output

_WORDS = ("yes", "no", "4", "12", "\\boxed{4}", "", "café: x ≤ 3\n", "<verdict>approve</verdict>")


class AnyText(Space[str]):
    """Every str, the empty one and those with lone surrogates included; samples are short."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Returns a short text."""
        return str(_WORDS[self.np_random.integers(len(_WORDS))])

    def contains(self, x: Any) -> bool:
        """Whether x is a str."""
        return isinstance(x, str)

    @property
    def is_np_flattenable(self) -> bool:
        """False: text is no array."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyText)

    def __repr__(self) -> str:
        return "AnyText()"


class Names(Space[str]):
    """One of a few names."""

    def __init__(self, names: Sequence[str], seed: int | np.random.Generator | None = None) -> None:
        self.names = tuple(names)
        super().__init__(shape=None, dtype=None, seed=seed)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Returns one of the names."""
        return self.names[self.np_random.integers(len(self.names))]

    def contains(self, x: Any) -> bool:
        """Whether x is one of the names."""
        return x in self.names

    @property
    def is_np_flattenable(self) -> bool:
        """False: a name is no array."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Names) and self.names == other.names

    def __repr__(self) -> str:
        return f"Names({', '.join(self.names)})"


class Members(Space[tuple[dict[str, Any], ...]]):
    """What the members of a set are asked: `({"agent": ..., "messages": ({"role": ..., "content": ...},)}, ...)`."""

    def __init__(self, agents: Sequence[str], k_max: int, seed: int | np.random.Generator | None = None) -> None:
        self.agents, self.k_max = tuple(agents), k_max
        super().__init__(shape=None, dtype=None, seed=seed)

    def sample(self, mask: Any = None, probability: Any = None) -> tuple[dict[str, Any], ...]:
        """Returns a set of one to K_max members with a short prompt each."""
        return tuple(
            {
                "agent": self.agents[self.np_random.integers(len(self.agents))],
                "messages": ({"role": "user", "content": str(_WORDS[self.np_random.integers(len(_WORDS))])},),
            }
            for _ in range(self.np_random.integers(1, self.k_max + 1))
        )

    def contains(self, x: Any) -> bool:
        """Whether x is a set of at most K_max members of these agents, with their messages."""
        return isinstance(x, tuple) and len(x) <= self.k_max and all(self._is_member(member) for member in x)

    def _is_member(self, member: Any) -> bool:
        return (
            isinstance(member, dict)
            and member.keys() == {"agent", "messages"}
            and member["agent"] in self.agents
            and isinstance(member["messages"], tuple)
            and all(
                isinstance(message, dict)
                and message.keys() == {"role", "content"}
                and all(isinstance(text, str) for text in message.values())
                for message in member["messages"]
            )
        )

    @property
    def is_np_flattenable(self) -> bool:
        """False: prompts are no array."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Members) and (self.agents, self.k_max) == (other.agents, other.k_max)

    def __repr__(self) -> str:
        return f"Members({', '.join(self.agents)}; K <= {self.k_max})"


class Outputs(Space[tuple[Any, ...]]):
    """The outputs of an active set: one to K_max entries, each a str or an `Output`; a sample is K_max short texts."""

    def __init__(self, k_max: int, seed: int | np.random.Generator | None = None) -> None:
        self.k_max = k_max
        super().__init__(shape=None, dtype=None, seed=seed)

    def sample(self, mask: Any = None, probability: Any = None) -> tuple[Any, ...]:
        """Returns K_max short texts."""
        return tuple(str(_WORDS[i]) for i in self.np_random.integers(len(_WORDS), size=self.k_max))

    def contains(self, x: Any) -> bool:
        """Whether x is a tuple or list of one to K_max outputs."""
        return (
            isinstance(x, tuple | list)
            and 1 <= len(x) <= self.k_max
            and all(isinstance(each, str | Output) for each in x)
        )

    @property
    def is_np_flattenable(self) -> bool:
        """False: outputs are no array."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outputs) and self.k_max == other.k_max

    def __repr__(self) -> str:
        return f"Outputs(K <= {self.k_max})"
