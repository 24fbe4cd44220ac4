"""Does a run that was killed end where an uninterrupted one does: weights, optimiser, log and metrics?"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from srpo_env import EventLog, train
from srpo_env.runs import Run, checkpoints, read_metrics
from srpo_env.trainers.srpo.learner import SRPOLearner

UPDATES = 6
TINY = [
    "tasks.train.size=40",
    "tasks.eval.size=4",
    "rollout.tasks_per_batch=3",
    "rollout.group_size=4",
    "log.checkpoint_every_updates=1",
    "log.keep=2",
    "eval.every_updates=2",
    f"updates={UPDATES}",
]
ADAPTER = ["policies.main.train.lora.rank=2"]
TIMES = {"seconds", "seconds_sampling", "seconds_logprobs", "seconds_update", "tokens_per_second", "started", "run"}


def state_of(folder: Path) -> dict[str, Any]:
    """Everything that must be equal, whatever happened on the way."""
    last = checkpoints(folder)[-1]
    (weights,) = (last / "main").glob("*.safetensors")
    state = torch.load(last / "trainer.pt", weights_only=True)
    return {
        "weights": {name: each.tolist() for name, each in load_file(weights).items()},
        "optimiser": {
            str(key): {name: torch.as_tensor(value).tolist() for name, value in values.items()}
            for key, values in state["optimisers"]["main"]["state"].items()
        },
        "rest": (state["updates"], state["versions"], state["generator"].tolist(), state["watch"]),
        "events": sorted(
            (event.batch, event.episode, event.step, *[member.output.output_ids for member in event.members])
            for event in EventLog(folder)
        ),
        "metrics": [without_times(line) for line in read_metrics(folder) if line["kind"] != "result"],
        "results": sum(line["kind"] == "result" for line in read_metrics(folder)),
        "checkpoints": [path.name for path in checkpoints(folder)],
        "best": (folder / "checkpoints" / "best").resolve().name,
    }


def without_times(line: Any) -> Any:
    if isinstance(line, dict):
        return {key: without_times(value) for key, value in line.items() if key not in TIMES and "seconds" not in key}
    return line


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [name for name, each in expected.items() if found[name] != each]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What uninterrupted runs leave: of all weights, and of an adapter."""
    folder = tmp_path_factory.mktemp("whole")
    found = {}
    for name, more in (("weights", []), ("adapter", ADAPTER)):
        train("arithmetic_tiny", [*TINY, *more, f"run={folder / name}"])
        found[name] = state_of(folder / name)
    return found


def test_an_uninterrupted_run_has_every_event_and_line_once(whole: dict[str, dict[str, Any]]) -> None:
    events = [event[:3] for event in whole["weights"]["events"]]
    lines = [(line["kind"], line["update"], line.get("workflow")) for line in whole["weights"]["metrics"]]
    assert len(set(events)) == len(events)
    assert len(set(lines)) == len(lines)
    assert {update for kind, update, _ in lines if kind == "update"} == set(range(1, UPDATES + 1))
    assert {update for kind, update, _ in lines if kind == "eval"} == {0, 2, 4, 6}


class Killed(BaseException):
    """Stands for the kill."""


def killed_after(kind: type, method: str, calls: int, monkeypatch: pytest.MonkeyPatch, *, before: bool = False) -> None:
    """Ends the run at the given call of a method, after it or before."""
    original, made = getattr(kind, method), []

    def counting(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        if before and len(made) == calls:
            raise Killed
        result = original(*args, **kwargs)
        if len(made) == calls:
            raise Killed
        return result

    monkeypatch.setattr(kind, method, counting)


@pytest.mark.parametrize(
    ("kind", "method", "calls", "what"),
    [
        (SRPOLearner, "update", 3, "weights"),  # learned, and neither told nor kept
        (SRPOLearner, "save", 4, "adapter"),  # in the middle of a checkpoint
        (Run, "mark_best", 3, "weights"),  # evaluated after a checkpoint that has no trace of it
    ],
)
def test_a_run_that_broke_off_ends_bit_for_bit_as_if_it_had_not(
    kind: type,
    method: str,
    calls: int,
    what: str,
    whole: dict[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        killed_after(kind, method, calls, patched)
        with pytest.raises(Killed):
            train("arithmetic_tiny", [*TINY, *(ADAPTER if what == "adapter" else []), f"run={tmp_path / 'run'}"])
    train(tmp_path / "run", resume=True)
    assert differing(state_of(tmp_path / "run"), whole[what]) == []


# ------------------------------------------------------------------------------------- real kills

# Imports once; then runs each job in a child, kills it when it is told to, and says how it ended.
RUNNER = """
import json, os, signal, sys, time, traceback
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
import srpo_env.agents.local, srpo_env.trainers.srpo, srpo_env.report, srpo_env.training as training
torch.set_num_threads(1)
for line in sys.stdin:
    after_s, job = json.loads(line)
    child = os.fork()
    if not child:
        try:
            training.train(**job)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)  # a child that has ended keeps its number until it is waited for
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Runner:
    """Trains in processes that can be killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", RUNNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
        )

    def train(self, *, kill_after_s: float | None = None, **arguments: Any) -> int:
        """Returns the status of the process, which is the signal that ended it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([kill_after_s, arguments]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.close()


@pytest.mark.slow
def test_twenty_kills_at_random_points_leave_no_trace(
    whole: dict[str, dict[str, Any]], runner: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, kills, runs = random.Random(0), 0, 0
    settings = [*TINY, f"run={tmp_path / 'run'}"]
    began = time.monotonic()
    assert runner.train(target="arithmetic_tiny", overrides=settings) == 0
    seconds = time.monotonic() - began
    assert differing(state_of(tmp_path / "run"), whole["weights"]) == []
    at = []
    while kills < 20:
        shutil.rmtree(tmp_path / "run")
        status = -1
        while status:
            begun = (tmp_path / "run" / "config.yaml").is_file()
            if not begun:
                shutil.rmtree(tmp_path / "run", ignore_errors=True)
            job = {"target": str(tmp_path / "run"), "resume": True}
            job = job if begun else {"target": "arithmetic_tiny", "overrides": settings}
            after = draw.uniform(0.02, seconds / 2) if kills < 20 else None
            status = runner.train(kill_after_s=after, **job)
            assert status in (0, signal.SIGKILL)
            kills += status == signal.SIGKILL
            at += [len(checkpoints(tmp_path / "run"))] if status else []
        runs += 1
        assert differing(state_of(tmp_path / "run"), whole["weights"]) == []
    with capsys.disabled():
        print(f"\n{kills} kills of {runs} runs of {seconds:.1f} s, with so many checkpoints kept: {at}")
