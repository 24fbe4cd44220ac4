"""A made-up world to search in: people, companies and cities, passages that tell of them, and questions about them.

A passage is about one person, company or city and states two facts. A question asks for one, `Moril's employer`, or for
two in a row, `Moril's employer's seat`; the second kind takes a second search, for what the first one found. There is a
world to train in and one to test in, and they share no name: what is learnt in the one helps in the other only where it
was to look things up.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from srpo_env.errors import InvalidInput
from srpo_env.settings import checked
from srpo_env.tasks import Task, TaskSet
from srpo_env.tools.qa import qa_exact_match
from srpo_env.tools.search import Passage, Search, SearchIndex

STARTS = tuple(consonant + vowel for consonant in "BDGKLMNRTV" for vowel in "aeiou")
ENDS = tuple(consonant + rhyme for consonant in "bdgklmnrtv" for rhyme in ("al", "ex", "il", "on", "um"))
"""A name is one of the starts and one of the ends, such as Moril."""

TEST_SHARE = 0.25
COMPANIES = {"train": 120, "test": 40}
"""As many cities and rivers, and three times as many people."""


RELATIONS: Mapping[str, tuple[str, str]] = {
    "employer": ("person", "company"),
    "birthplace": ("person", "city"),
    "head": ("company", "person"),
    "seat": ("company", "city"),
    "mayor": ("city", "person"),
    "river": ("city", "river"),
}
"""Of each fact, the kind of its subject and of its object."""

ONE_HOP = tuple((name,) for name in RELATIONS)
TWO_HOPS = tuple(
    (first, second)
    for first in RELATIONS
    for second in RELATIONS
    if RELATIONS[second][0] == RELATIONS[first][1] and (first, second) != ("head", "employer")
)
"""Relations in the order in which they are looked up; whom a company is led by works there, mostly."""


@dataclass(frozen=True)
class World:
    """What is the case, and the passages that say so.

    Attributes:
        facts: Of each subject, the object of each of its relations.
        kinds: The subjects of each kind.
        passages: One for each subject, whose title it is.
    """

    facts: Mapping[str, Mapping[str, str]]
    kinds: Mapping[str, Sequence[str]]
    passages: Mapping[str, Passage]


def split_of(name: str) -> str:
    """The world that may use a name, whatever the seed."""
    share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
    return "test" if share < TEST_SHARE else "train"


@lru_cache(maxsize=8)
def world(split: str, seed: int) -> World:
    """Returns the world of a split, made from a seed.

    >>> one = world("test", 0)
    >>> len(one.passages), one.passages["Rumex"].text
    (200, 'has employer Tudil, birthplace Dagex.')
    """
    draw = random.Random(f"tiny_world/{split}/{seed}")
    size = COMPANIES[split]
    names = [start + end for start in STARTS for end in ENDS if split_of(start + end) == split]
    draw.shuffle(names)
    ends = {"company": size, "city": 2 * size, "river": 3 * size, "person": 6 * size}
    kinds = {kind: names[start : ends[kind]] for kind, start in zip(ends, (0, *ends.values()), strict=False)}
    facts = {
        subject: {name: draw.choice(kinds[to]) for name, (of, to) in RELATIONS.items() if of == kind}
        for kind in ("person", "company", "city")
        for subject in kinds[kind]
    }
    return World(facts, kinds, {subject: _passage(split, subject, facts[subject], draw) for subject in facts})


def _passage(split: str, subject: str, facts: Mapping[str, str], draw: random.Random) -> Passage:
    said = [f"{relation} {name}" for relation, name in facts.items()]
    draw.shuffle(said)
    return Passage(f"{split}/{subject}", subject, f"has {', '.join(said)}.")


def tiny_world(*, split: str = "train", seed: int = 0, size: int = 512) -> TaskSet:
    """Questions about a made-up world, half of them of one hop and half of two; the tool `tiny_world` searches it.

    Args:
        split: `train` or `test`.
        seed: Decides the world and which questions are drawn; the tool's is the same.
        size: Number of different questions.

    Raises:
        InvalidInput: There is no such split, there are fewer questions, or a number is none.
    """
    if split not in COMPANIES:
        raise InvalidInput(f"task set 'tiny_world': split {split!r}; it has {', '.join(COMPANIES)}.")
    if not (isinstance(seed, int) and isinstance(size, int)):
        raise InvalidInput(f"task set 'tiny_world': seed {seed!r}, size {size!r}; both are whole numbers.")
    draw = random.Random(f"tiny_world/questions/{split}/{seed}")
    kinds = [_questions(world(split, seed), paths, split, draw) for paths in (ONE_HOP, TWO_HOPS)]
    most = 2 * min(map(len, kinds))
    if not 1 <= size <= most:
        raise InvalidInput(f"task set 'tiny_world': size {size}; split {split!r} has 1 to {most} questions.")
    return TaskSet("tiny_world", tuple(kinds[at % 2][at // 2] for at in range(size)), reward=qa_exact_match)


def _questions(world_: World, paths: Sequence[tuple[str, ...]], split: str, draw: random.Random) -> list[Task]:
    """Every question of some paths in a drawn order, but those whose answer stands in them."""
    found = []
    for path in paths:
        for subject in world_.kinds[RELATIONS[path[0]][0]]:
            at, titles = subject, []
            for relation in path:
                titles.append(at)
                at = world_.facts[at][relation]
            if at != subject:
                gold = [world_.passages[title].id for title in titles]
                found.append(_task(split, path, subject, at, gold))
    draw.shuffle(found)
    return found


def _task(split: str, path: tuple[str, ...], subject: str, answer: str, gold: list[str]) -> Task:
    problem = subject + "".join(f"'s {relation}" for relation in path)
    meta = {"hops": len(path), "gold": gold}
    answers = (answer, f"{path[-1]} {answer}")
    return Task(id=f"{split}-{problem}", problem=problem, answers=answers, meta=meta, set="tiny_world")


class WorldSettings(BaseModel):
    """Settings of the tool `tiny_world`.

    Attributes:
        seed: Of the worlds, the one to train in and the one to test in: both are searched.
        top_k: Most passages of a result.
        blank: Shows the passages that are found without title and text: what does a team know by itself?
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = 0
    top_k: int = Field(2, ge=1, le=100)
    blank: bool = False


class WorldSearch(Search):
    """BM25 search in the passages of both worlds, as a tool.

    Args:
        name: What agents call it by.
        seed, top_k, blank: See `WorldSettings`.
    """

    def __init__(self, name: str = "search", *, seed: int = 0, top_k: int = 2, blank: bool = False) -> None:
        super().__init__(name, top_k, max_chars=1000)
        self.index = _index(seed)
        self.blank = blank

    @classmethod
    def from_config(cls, name: str, settings: Mapping[str, Any]) -> WorldSearch:
        """Returns the tool that a recipe describes.

        Raises:
            InvalidRecipe: A key is unknown, or a value breaks a rule.
        """
        return cls(name, **dict(checked(WorldSettings, f"tools.{name}", settings)))

    async def find(self, query: str) -> Sequence[Passage]:
        """Returns at most `top_k` passages, best first."""
        found = self.index.search(query, self.top_k)
        return [replace(passage, title="", text="") for passage in found] if self.blank else found


@lru_cache(maxsize=8)
def _index(seed: int) -> SearchIndex:
    return SearchIndex(passage for split in COMPANIES for passage in world(split, seed).passages.values())
