"""A run folder: what a run leaves behind, written so that a crash never leaves half a file.

config.yaml      the resolved recipe
run.json         recipe's name, when it started, versions
events/          the event log
metrics.jsonl    a line per update and per evaluation, and per task set where it has several
checkpoints/     000200/main/ is a transformers folder, or a peft one; best leads to the best one by the held-out figure
evaluation.json  what `eval` found; evaluation.md is its table
report.html
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from srpo_env.config import Recipe
from srpo_env.errors import InvalidInput, RunExists
from srpo_env.eventlog import Journal

_SEGMENTS = "segments.json"
"""In a checkpoint: the last segment of the event log that it has learned from."""
_PACKAGES = ("srpo-env", "torch", "transformers", "gymnasium", "pydantic", "vllm")


class Run:
    """One run's folder, open for writing."""

    def __init__(self, folder: Path, recipe: Recipe, name: str) -> None:
        self.folder = folder
        self.recipe = recipe
        self.name = name
        self.log = Journal(folder)

    @classmethod
    def create(cls, recipe: Recipe, name: str) -> Run:
        """Makes the folder: the recipe's `run`, or `runs/<name>-<time>`.

        Raises:
            RunExists: The folder exists and is not empty.
        """
        if recipe.run is None:
            folder = _unused(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        else:
            folder = Path(recipe.run)
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise RunExists(
                    f"run folder {folder} exists and is not empty; a run never overwrites another. Give another "
                    "`run=`, or remove it."
                )
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "config.yaml", recipe.model_copy(update={"run": str(folder)}).to_yaml())
        about = {"recipe": name, "started": time.time(), "python": platform.python_version(), "versions": _versions()}
        write_whole(folder / "run.json", json.dumps(about, indent=2))
        return cls(folder, recipe, name)

    @classmethod
    def resume(cls, recipe: Recipe, name: str) -> tuple[Run, Path | None]:
        """Opens a run's folder again at its last checkpoint.

        What was logged after it goes to `aside/`, and will be done again.

        Returns:
            The run, and its last whole checkpoint; None where it had none yet, and starts anew.

        Raises:
            InvalidInput: The folder is not that of a run.
        """
        folder = Path(recipe.run or "")
        if recipe.run is None or not (folder / "config.yaml").is_file():
            raise InvalidInput(
                f"{str(folder) if recipe.run else 'the run'!r} can't be resumed: it has no config.yaml; give the "
                "run's folder, as in `srpo-env train runs/mine --resume`."
            )
        found = checkpoints(folder)
        last = found[-1] if found else None
        kept = int(json.loads((last / _SEGMENTS).read_text(encoding="utf-8"))) if last else 0
        later = [path for path in (folder / "events").glob("*.jsonl") if int(path.stem) > kept]
        lines = read_metrics(folder)
        update = int(last.name) if last else -1
        aside = _unused(folder / "aside" / time.strftime("%Y%m%d-%H%M%S"))
        aside.mkdir(parents=True)
        for path, belongs in ((aside, False), (folder, True)):
            chosen = [line for line in lines if (_place(line) <= (update, 0)) == belongs]
            write_whole(path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in chosen))
        for path in later:
            path.replace(aside / path.name)
        return cls(folder, recipe, name), last

    def record(self, kind: str, update: int, **values: Any) -> None:
        """Adds a line to metrics.jsonl; a figure that is not finite becomes null."""
        line = json.dumps(_finite({"kind": kind, "update": update, **values})) + "\n"
        with (self.folder / "metrics.jsonl").open("ab", buffering=0) as file:
            file.write(line.encode())

    def checkpoint(self, update: int, write: Callable[[Path], None]) -> Path:
        """Writes a checkpoint whole or not at all; removes the oldest beyond the recipe's `keep`, but not the best."""
        folder = self.folder / "checkpoints"
        final, temporary = folder / f"{update:06d}", folder / f".writing-{update:06d}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        segment = self.log.segment
        self.log.rotate()
        try:
            write(temporary)
            (temporary / _SEGMENTS).write_text(str(segment), encoding="utf-8")
            for path in (temporary, *temporary.rglob("*")):
                _sync(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _remove(final)
        temporary.replace(final)
        _sync(folder)
        best = best_checkpoint(self.folder)
        for old in checkpoints(self.folder)[: -self.recipe.log.keep]:
            if old != best:
                _remove(old)
        return final

    def mark_best(self) -> None:
        """Lets `checkpoints/best` lead to the best checkpoint, if any was tried on the held-out tasks."""
        best = best_checkpoint(self.folder)
        if best is not None:
            link = best.with_name(".marking-best")
            link.unlink(missing_ok=True)
            link.symlink_to(best.name)
            link.replace(best.with_name("best"))

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.log.close()


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints of a run folder, oldest first."""
    return sorted(path for path in (folder / "checkpoints").glob("[0-9]*") if path.is_dir())


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the best held-out figure, the first of equals; None where none was tried.

    The figure is the baseline workflow's where the recipe names one, whose line comes after the team's.
    """
    evaluations = (line for line in read_metrics(folder) if line["kind"] == "eval" and line.get("set") is None)
    figures = {line["update"]: line["avg_at_k"] for line in evaluations if line.get("avg_at_k") is not None}
    tried = [path for path in checkpoints(folder) if int(path.name) in figures]
    return max(tried, key=lambda path: figures[int(path.name)], default=None)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; a torn last line is left out."""
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines if line]


def _place(line: Mapping[str, Any]) -> tuple[int, int]:
    """When a line of metrics was written: an update's own line before its checkpoint, all others after it."""
    return line["update"], 0 if line["kind"] == "update" else 1


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(text, encoding="utf-8")
    _sync(temporary)
    temporary.replace(path)


def _remove(folder: Path) -> None:
    """Removes a checkpoint: it leaves its name first, so that no half of it is ever found there."""
    if folder.exists():
        gone = folder.with_name(f".removing-{folder.name}")
        shutil.rmtree(gone, ignore_errors=True)
        folder.replace(gone)
        shutil.rmtree(gone)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unused(folder: Path) -> Path:
    number, found = 2, folder
    while found.exists():
        found, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
