"""What would a training run do? Its plan, the servers to start and its memory; nothing is loaded or written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from srpo_env.config import Recipe, find_recipe
from srpo_env.errors import MissingModel
from srpo_env.jobs import Job
from srpo_env.memory import Memory, estimate
from srpo_env.training import plan_of


class DryRun(BaseModel):
    """A recipe with everything that it names found and checked.

    Attributes:
        recipe: Complete with defaults.
        file: Where it is.
        servers: The commands that start the servers of each policy that has some.
        memory: What the run takes in its process; None where that can't be told.
    """

    model_config = ConfigDict(frozen=True)

    recipe: Recipe
    file: Path
    servers: dict[str, list[str]]
    memory: Memory | None
    _plan: tuple[str, ...] = ()

    @classmethod
    def of(cls, target: str, overrides: Sequence[str] = ()) -> DryRun:
        """Finds and checks what a recipe names.

        Raises:
            InvalidInput: As `Job.prepare`.
        """
        job, file = Job.prepare(target, overrides), find_recipe(target)
        assert job.settings is not None
        memory = _memory(job)
        known = memory if isinstance(memory, Memory) else None
        found = cls(recipe=job.recipe, file=file, servers=job.servers(), memory=known)
        settings = f" with {' '.join(overrides)}" if overrides else ""
        found._plan = (
            f"{file}{settings}: nothing was run.",
            plan_of(job),
            *found._policies(),
            f"memory of this process, estimated: {memory if known else f'none: {memory}'}",
        )
        return found

    def __str__(self) -> str:
        """The plan as comments above the recipe, so that the whole is a recipe again."""
        return "".join(f"# {line}\n" for line in self._plan) + self.recipe.to_yaml()

    def _policies(self) -> list[str]:
        lines = []
        for label, use in self.recipe.policies.items():
            how = "frozen" if use.train is None else "trained"
            lines.append(f"policy {label}: {use.model or 'no model'}, {how}, sampled by {use.sample.backend}")
            lines += [f"  start: {command}" for command in self.servers.get(label, ())]
        return lines


def _memory(job: Job) -> Memory | str:
    """What a run would take, or why that can't be told."""
    try:
        return estimate(job)
    except MissingModel as error:
        return str(error)
