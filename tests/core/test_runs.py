"""Is everything in a run folder whole, whatever happened while it was written?"""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from srpo_env.config import Recipe, load_recipe
from srpo_env.errors import InvalidInput, RunExists
from srpo_env.eventlog import EventLog
from srpo_env.runs import Run, best_checkpoint, checkpoints, read_metrics, write_whole

Make = Callable[..., Any]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A recipe whose run folder is `tmp_path/run`; it keeps two checkpoints."""
    return Recipe.model_validate(
        {
            "workflow": "single_agent",
            "tasks": {"train": {"use": "arithmetic"}},
            "policies": {"main": {"model": "tiny_arithmetic"}},
            "log": {"keep": 2},
            "run": str(tmp_path / "run"),
        }
    )


def weights(text: str = "whole") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "main").mkdir()
        (folder / "main" / "weights").write_text(text)

    return write


def break_off(folder: Path) -> None:
    weights("half")(folder)
    raise OSError("No space left on device")


def names(run: Run) -> list[str]:
    return [path.name for path in checkpoints(run.folder)]


# The folder.


def test_a_new_run_holds_its_resolved_recipe(recipe: Recipe) -> None:
    with Run.create(recipe, "r") as run:
        assert load_recipe(run.folder) == recipe


def test_a_new_run_says_what_it_was_made_with(recipe: Recipe) -> None:
    with Run.create(recipe, "my_recipe") as run:
        about = json.loads((run.folder / "run.json").read_text())
    assert about["recipe"] == "my_recipe"
    assert {"srpo-env", "torch", "gymnasium"} <= about["versions"].keys()


def test_a_run_never_overwrites_another(recipe: Recipe) -> None:
    Run.create(recipe, "r").log.close()
    before = (Path(str(recipe.run)) / "run.json").read_bytes()
    with pytest.raises(RunExists, match=r"run folder .*/run exists and is not empty"):
        Run.create(recipe, "r")
    assert (Path(str(recipe.run)) / "run.json").read_bytes() == before


def test_a_file_in_the_place_of_a_run_is_not_overwritten(recipe: Recipe) -> None:
    Path(str(recipe.run)).write_text("mine")
    with pytest.raises(RunExists):
        Run.create(recipe, "r")


def test_an_empty_folder_may_become_a_run(recipe: Recipe) -> None:
    Path(str(recipe.run)).mkdir()
    with Run.create(recipe, "r") as run:
        assert (run.folder / "config.yaml").is_file()


def test_runs_without_a_name_of_their_own_never_meet(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nameless = recipe.model_copy(update={"run": None})
    folders = set()
    for _ in range(3):
        with Run.create(nameless, "r") as run:
            folders.add(run.folder)
    assert len(folders) == 3


# Checkpoints.


def test_a_checkpoint_holds_what_was_written(recipe: Recipe) -> None:
    with Run.create(recipe, "r") as run:
        folder = run.checkpoint(7, weights())
    assert (folder.name, (folder / "main" / "weights").read_text()) == ("000007", "whole")


def test_a_writer_that_breaks_off_leaves_the_older_checkpoint_and_no_half_one(recipe: Recipe) -> None:
    with Run.create(recipe, "r") as run:
        run.checkpoint(10, weights())
        with pytest.raises(OSError, match="No space left"):
            run.checkpoint(20, break_off)
        assert names(run) == ["000010"]
        assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["000010"]


def test_a_writer_that_breaks_off_leaves_an_older_checkpoint_of_the_same_update(recipe: Recipe) -> None:
    with Run.create(recipe, "r") as run:
        run.checkpoint(10, weights())
        with pytest.raises(OSError, match="No space left"):
            run.checkpoint(10, break_off)
        assert (checkpoints(run.folder)[0] / "main" / "weights").read_text() == "whole"


def test_what_a_killed_writer_left_is_no_checkpoint_and_does_not_get_into_the_next(recipe: Recipe) -> None:
    with Run.create(recipe, "r") as run:
        left = run.folder / "checkpoints" / ".writing-000020"
        left.mkdir(parents=True)
        (left / "half").write_text("half")
        assert names(run) == []
        folder = run.checkpoint(20, weights())
    assert not (folder / "half").exists()


def test_a_checkpoint_has_no_final_name_before_it_is_whole(recipe: Recipe) -> None:
    seen: list[list[str]] = []
    with Run.create(recipe, "r") as run:
        run.checkpoint(3, lambda folder: seen.append(names(run)))
    assert seen == [[]]


def test_a_checkpoint_is_on_disk_before_it_gets_its_name(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    opened: dict[int, str] = {}
    real_open, real_sync, real_replace = os.open, os.fsync, Path.replace

    def open_(path: Any, *rest: Any) -> int:
        opened[file := real_open(path, *rest)] = Path(path).name
        return file

    def replace(self: Path, target: Any) -> Path:
        order.append(f"-> {Path(target).name}")
        return real_replace(self, target)

    with Run.create(recipe, "r") as run:
        monkeypatch.setattr(os, "open", open_)
        monkeypatch.setattr(os, "fsync", lambda file: (order.append(opened[file]), real_sync(file))[1])
        monkeypatch.setattr(Path, "replace", replace)
        run.checkpoint(3, weights())
        monkeypatch.undo()
    assert order.index("weights") < order.index("-> 000003")
    assert order.index("main") < order.index("-> 000003")
    assert order[-1] == "checkpoints"


def test_the_oldest_checkpoints_are_removed(recipe: Recipe) -> None:
    with Run.create(recipe, "r") as run:
        for update in (5, 10, 15, 20):
            run.checkpoint(update, weights())
        assert names(run) == ["000015", "000020"]


def test_a_checkpoint_that_is_removed_first_loses_its_name(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    with Run.create(recipe, "r") as run:
        for update in (5, 10):
            run.checkpoint(update, weights())
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)
            run.checkpoint(15, weights())
        assert names(run) == ["000010", "000015"]


# Metrics.


def test_metrics_come_back(recipe: Recipe) -> None:
    with Run.create(recipe, "r") as run:
        run.record("update", 1, metrics={"loss": 0.5})
        run.record("eval", 1, avg_at_k=0.25)
    assert read_metrics(run.folder) == [
        {"kind": "update", "update": 1, "metrics": {"loss": 0.5}},
        {"kind": "eval", "update": 1, "avg_at_k": 0.25},
    ]


def test_a_figure_that_is_not_finite_is_null_and_the_line_stays_json(recipe: Recipe) -> None:
    with Run.create(recipe, "r") as run:
        run.record("update", 1, metrics={"kl": math.inf, "loss": [math.nan, 1.0]}, reward=-math.inf)
    (line,) = (run.folder / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (found["metrics"], found["reward"]) == ({"kl": None, "loss": [None, 1.0]}, None)


def test_a_torn_last_line_of_metrics_is_left_out(recipe: Recipe) -> None:
    with Run.create(recipe, "r") as run:
        run.record("update", 1)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "upd')
    assert [line["update"] for line in read_metrics(run.folder)] == [1]


def test_a_run_without_metrics_has_none(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


# Whole files.


def test_a_file_that_could_not_be_written_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError("No space left on device")

    write_whole(tmp_path / "a", "first")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "a", "second")
    assert (tmp_path / "a").read_text() == "first"


def test_a_whole_file_may_hold_any_text(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "é\u2028\U0001d49c")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "é\u2028\U0001d49c"


# Resuming.


@pytest.fixture
def broken_off(recipe: Recipe, event: Make) -> Recipe:
    """A run that was killed in its third update, after a checkpoint at the second."""
    with Run.create(recipe, "r") as run:
        for update in (1, 2):
            run.log.append(event(batch=f"update-{update}"))
            run.record("update", update)
        run.checkpoint(2, weights())
        run.log.append(event(batch="eval-2"))
        run.record("eval", 2)
        run.log.append(event(batch="update-3"))
    return recipe


def test_a_resumed_run_goes_on_from_its_last_checkpoint(broken_off: Recipe) -> None:
    run, checkpoint = Run.resume(broken_off, "r")
    run.log.close()
    assert checkpoint is not None
    assert checkpoint.name == "000002"
    assert [each.batch for each in EventLog(run.folder)] == ["update-1", "update-2"]
    assert [(line["kind"], line["update"]) for line in read_metrics(run.folder)] == [("update", 1), ("update", 2)]


def test_what_a_resumed_run_will_do_again_is_kept_aside(broken_off: Recipe, tmp_path: Path) -> None:
    run, _ = Run.resume(broken_off, "r")
    run.log.close()
    (aside,) = (run.folder / "aside").iterdir()
    (tmp_path / "look").mkdir()
    shutil.copytree(aside, tmp_path / "look" / "events")
    assert [line["kind"] for line in read_metrics(aside)] == ["eval"]
    (tmp_path / "look" / "events" / "metrics.jsonl").unlink()
    assert [each.batch for each in EventLog(tmp_path / "look")] == ["eval-2", "update-3"]


def test_a_run_that_had_no_checkpoint_starts_anew(recipe: Recipe, event: Make) -> None:
    with Run.create(recipe, "r") as first:
        first.log.append(event())
        first.record("update", 1)
    run, checkpoint = Run.resume(recipe, "r")
    run.log.close()
    assert (checkpoint, len(EventLog(run.folder)), read_metrics(run.folder)) == (None, 0, [])


def test_a_run_may_be_resumed_twice(broken_off: Recipe) -> None:
    for _ in range(2):
        run, _ = Run.resume(broken_off, "r")
        run.log.close()
    assert [each.batch for each in EventLog(run.folder)] == ["update-1", "update-2"]


def test_a_folder_that_is_no_run_can_not_be_resumed(recipe: Recipe) -> None:
    with pytest.raises(InvalidInput, match="can't be resumed"):
        Run.resume(recipe, "r")


# The best checkpoint.


def tried(run: Run, figures: dict[int, float | None], workflow: str = "team") -> None:
    for update, accuracy in figures.items():
        run.record("eval", update, workflow=workflow, avg_at_k=accuracy)


def test_the_best_checkpoint_stays_beside_the_last_ones(recipe: Recipe) -> None:
    with Run.create(recipe, "r") as run:
        for update, accuracy in enumerate([0.2, 0.9, 0.5, 0.9, 0.4], start=1):
            run.checkpoint(update, weights())
            tried(run, {update: accuracy})
            run.mark_best()
        assert names(run) == ["000002", "000004", "000005"]
        assert (run.folder / "checkpoints" / "best" / "main" / "weights").read_text() == "whole"
        assert (run.folder / "checkpoints" / "best").resolve().name == "000002"


def test_a_better_one_takes_the_place_of_the_best(recipe: Recipe) -> None:
    with Run.create(recipe, "r") as run:
        for update, accuracy in enumerate([0.5, 0.1, 0.1, 0.6, 0.1, 0.1], start=1):
            run.checkpoint(update, weights())
            tried(run, {update: accuracy})
            run.mark_best()
        run.checkpoint(7, weights())
        assert names(run) == ["000004", "000006", "000007"]


def test_the_baselines_figure_is_the_one_that_counts(recipe: Recipe) -> None:
    with Run.create(recipe, "r") as run:
        for update, (team, baseline) in enumerate([(0.9, 0.2), (0.3, 0.4)], start=1):
            run.checkpoint(update, weights())
            tried(run, {update: team})
            tried(run, {update: baseline}, "baseline")
        assert best_checkpoint(run.folder) == run.folder / "checkpoints" / "000002"


def test_the_figure_of_a_part_of_the_tasks_does_not_count(recipe: Recipe) -> None:
    with Run.create(recipe, "r") as run:
        for update, (whole, part) in enumerate([(0.5, 0.1), (0.4, 0.9)], start=1):
            run.checkpoint(update, weights())
            tried(run, {update: whole})
            run.record("eval", update, workflow="team", set="level 1", avg_at_k=part)
        assert best_checkpoint(run.folder) == run.folder / "checkpoints" / "000001"


def test_without_a_figure_none_is_best(recipe: Recipe) -> None:
    with Run.create(recipe, "r") as run:
        tried(run, {0: 0.9})  # before the first update there is no checkpoint
        run.checkpoint(1, weights())
        tried(run, {1: None})
        run.mark_best()
        assert best_checkpoint(run.folder) is None
        assert not (run.folder / "checkpoints" / "best").exists()
