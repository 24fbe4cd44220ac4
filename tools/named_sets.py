"""Where does a task set with a name come from: a file in the data folder, or else the Hugging Face hub?"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from srpo_env.errors import InvalidInput, InvalidTask, nearest
from srpo_env.rewards import Reward
from srpo_env.task_rows import HUB, read_rows
from srpo_env.tasks import Task, TaskSet, tasks_of

FOLDER_VARIABLE = "SRPO_ENV_DATA"

Row = dict[str, Any]


@dataclass(frozen=True)
class NamedSet:
    """A task set that is loaded when it is called.

    Attributes:
        name: As in `tasks: NAME`.
        folder: Of the data folder: `math` or `search`.
        files: Of each split, the names of the file that holds it, best first. A file whose rows have a `split` holds
            several.
        hub: Data set of the hub, `ORG/NAME` or `ORG/NAME:CONFIG`.
        splits: What the hub, and the `split` of a file's rows, call each split.
        licence: Of the data, in a few words.
        reward: Scores an answer.
        columns: What the hub or the file calls `id`, `problem` and `answer`, where it does not call them so.
        fix: Makes a row of the hub or the file fit.
        repeats: Whether the hub's rows come several times; the first with a problem counts.
        check: Why a task can't be scored, or None; such tasks are reported when the set is loaded.
    """

    name: str
    folder: str
    files: Mapping[str, tuple[str, ...]]
    hub: str
    splits: Mapping[str, str]
    licence: str
    reward: Reward
    columns: Mapping[str, str] = field(default_factory=dict)
    fix: Callable[[Row], Row] = dict
    repeats: bool = False
    check: Callable[[Task], str | None] = lambda task: None

    @property
    def about(self) -> str:
        """Splits, licence, and how to get the set, in one line."""
        files = " or ".join(f"{self.folder}/{name}" for name in dict.fromkeys(sum(self.files.values(), ())))
        return (
            f"{', '.join(self.files)}; licence: {self.licence}; from ${FOLDER_VARIABLE}/{files}, or with the extra "
            f"`datasets` from {self.hub} on the hub"
        )

    def __call__(self, *, split: str = "train") -> TaskSet:
        """Loads a split.

        Raises:
            InvalidInput: There is no such split, or the set is neither in the data folder nor on the hub in reach.
        """
        if split not in self.files:
            raise InvalidInput(
                f"task set {self.name!r}: split {split!r}; it has {', '.join(self.files)}.{nearest(split, self.files)}"
            )
        tasks = self._load(split)
        unscorable = [task.id for task in tasks.tasks if self.check(task) is not None]
        if unscorable:
            shown = ", ".join(unscorable[:5]) + (", ..." if len(unscorable) > 5 else "")
            warnings.warn(
                f"task set {self.name!r}, split {split!r}: {len(unscorable)} of {len(tasks)} tasks have a reference "
                f"answer that nothing can be compared with, and are unscored: {shown}.",
                stacklevel=2,
            )
        return tasks

    def _load(self, split: str) -> TaskSet:
        folder = os.environ.get(FOLDER_VARIABLE)
        for name in self.files[split] if folder else ():
            path = Path(str(folder)) / self.folder / name
            if path.is_file() and (rows := self._rows(str(path), split)):
                return self._of(rows, str(path))
        if find_spec("datasets") is None:
            raise InvalidTask(
                f"task set {self.name!r}, split {split!r}, is not here. Either put it (rows of id, problem, answer) at "
                f"${FOLDER_VARIABLE}/{self.folder}/{self.files[split][0]}; {FOLDER_VARIABLE} is "
                f"{repr(folder) if folder else 'not set'}. Or run `pip install 'srpo-env[datasets]'` to load "
                f"{self.hub} from the hub."
            )
        return self._of(self._rows(HUB + self.hub, split), HUB + self.hub)

    def _rows(self, source: str, split: str) -> list[tuple[str, Row]]:
        """The rows of a split; none where a file holds other splits alone."""
        name = self.splits[split]
        rows = ((place, self.fix(row)) for place, row in read_rows(source, name) if row.get("split", name) == name)
        if not self.repeats:
            return list(rows)
        first: dict[Any, tuple[str, Row]] = {}
        for place, row in rows:
            first.setdefault(row.get("problem"), (place, row))
        return list(first.values())

    def _of(self, rows: list[tuple[str, Row]], source: str) -> TaskSet:
        return tasks_of(rows, self.name, columns=self.columns, reward=self.reward, source=source)
