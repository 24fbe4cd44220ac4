"""Does the whole chain hold: from a recipe to weights, log, metrics and report, and back after a stop?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from srpo_env import EventLog, evaluate, train
from srpo_env.errors import PolicyError
from srpo_env.runs import checkpoints, read_metrics
from srpo_env.training import TrainResult

SMALL = ["tasks.eval.size=32", "rollout.tasks_per_batch=8"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    folder = tmp_path_factory.mktemp("end_to_end") / "run"
    return train("arithmetic_tiny", [*SMALL, "updates=3", f"run={folder}"])


def test_every_event_of_every_update_is_in_the_log(run: TrainResult) -> None:
    log = EventLog(run.run)
    sizes = {name: len(log.episodes(name)) for name in {event.batch for event in log}}
    updates = {f"update-{n}": 64 for n in (1, 2, 3)}
    assert sizes == {**updates, "eval-0": 32, "baseline-0": 32, "eval-3": 32, "baseline-3": 32}
    assert log.damage == []
    assert {len(event.members) for event in log if event.batch.startswith("update")} == {3}


def test_outputs_carry_what_was_sampled_and_the_version_that_sampled_it(run: TrainResult) -> None:
    for event in EventLog(run.run):
        for member in event.members:
            output = member.output
            assert output.output_ids
            assert output.logprobs
            assert len(output.output_ids) == len(output.logprobs)
            if event.batch.startswith("update-"):
                assert output.policy_version == int(event.batch.removeprefix("update-")) - 1


def test_the_metrics_tell_of_each_update(run: TrainResult) -> None:
    lines = [line["metrics"] for line in read_metrics(Path(run.run)) if line["kind"] == "update"]
    assert [line["event_completeness"] for line in lines] == [1.0] * 3
    assert [line["steps"] for line in lines] == [2.0] * 3
    assert [line["share_of_sets_over_1"] for line in lines] == [1.0] * 3
    assert all(line["grad_norm"] > 0 and line["sampler_mismatch_token"] < 1e-4 for line in lines)


def test_the_seconds_of_an_update_are_told_by_what_they_were_spent_on(run: TrainResult) -> None:
    updates = [line["metrics"] for line in read_metrics(Path(run.run)) if line["kind"] == "update"]
    for each in updates:
        parts = [each[f"seconds_{part}"] for part in ("sampling", "logprobs", "update", "logging")]
        assert min(parts) > 0 or each["seconds_logprobs"] == 0
        assert sum(parts) <= each["seconds"]


def test_the_weights_have_moved_and_load_in_plain_transformers(run: TrainResult) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from srpo_env.models import resolve_model

    trained = AutoModelForCausalLM.from_pretrained(Path(run.checkpoint) / "main").state_dict()
    start = AutoModelForCausalLM.from_pretrained(resolve_model("tiny_arithmetic")).state_dict()
    assert any(bool((trained[name] != start[name]).any()) for name in start)
    tokenizer = AutoTokenizer.from_pretrained(Path(run.checkpoint) / "main")
    assert tokenizer.decode(tokenizer("37+58=")["input_ids"]) == "37+58="


def test_the_report_is_one_page_without_remote_parts(run: TrainResult) -> None:
    page = Path(run.report).read_text(encoding="utf-8")
    assert "arithmetic_tiny" in page
    assert "<script" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_a_run_can_be_repeated_to_the_bit(run: TrainResult, tmp_path: Path) -> None:
    again = train("arithmetic_tiny", [*SMALL, "updates=3", f"run={tmp_path / 'run'}"])
    assert sorted(EventLog(run.run), key=key) == sorted(EventLog(again.run), key=key)
    weights = [Path(each.checkpoint) / "main" / "model.safetensors" for each in (run, again)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_run_that_ended_with_an_epoch_goes_on_with_the_next_one(tmp_path: Path) -> None:  # B049
    settings = ["tasks.train.size=4", "tasks.eval.size=4", "rollout.tasks_per_batch=2"]
    settings.append("policies.main.train.schedule=constant")
    whole = train("arithmetic_tiny", [*settings, "updates=4", f"run={tmp_path / 'whole'}"])
    train("arithmetic_tiny", [*settings, "updates=2", f"run={tmp_path / 'part'}"])
    resumed = train(tmp_path / "part", ["updates=4"], resume=True)
    tasks = [
        [sorted({event.task for event in EventLog(each.run) if event.batch == f"update-{n}"}) for n in (1, 2, 3, 4)]
        for each in (whole, resumed)
    ]
    assert tasks[0] == tasks[1]
    assert sorted(tasks[1][0] + tasks[1][1]) == sorted(tasks[1][2] + tasks[1][3])  # each epoch has every task once
    weights = [Path(each.checkpoint) / "main" / "model.safetensors" for each in (whole, resumed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def key(event: object) -> tuple[str, str, int]:
    return event.batch, event.episode, event.step  # type: ignore[attr-defined]


def test_ctrl_c_leaves_a_readable_run_that_goes_on_where_it_stopped(run: TrainResult, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = [*SMALL, "updates=3", f"run={folder}", "log.checkpoint_every_updates=1"]
    command = [sys.executable, "-m", "srpo_env.cli", "train", "arithmetic_tiny", *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        while process.poll() is None and not checkpoints(folder):
            time.sleep(0.01)  # nothing tells of the first checkpoint but the folder itself
        process.send_signal(signal.SIGINT)
        _, told = process.communicate()
    if process.returncode == 0:
        pytest.skip("the run ended before it could be interrupted")
    assert process.returncode == 130, told
    assert str(folder) in told
    assert EventLog(folder).events
    resumed = train(folder, resume=True)
    assert resumed.updates == 3
    weights = [Path(each.checkpoint) / "main" / "model.safetensors" for each in (run, resumed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert json.loads((folder / "run.json").read_text())["recipe"] == "arithmetic_tiny"


def test_policies_that_can_rest_do_so_while_the_learner_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from srpo_env.agents.local import LocalPolicy
    from srpo_env.trainers.srpo import SRPOLearner

    did: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            if did[-1:] != [name]:
                did.append(name)
            return function(*given, **named)

        return call

    monkeypatch.setattr(LocalPolicy, "sample", noted("sample", LocalPolicy.sample))
    monkeypatch.setattr(LocalPolicy, "rest", noted("rest", lambda self: None), raising=False)
    monkeypatch.setattr(SRPOLearner, "update", noted("learn", SRPOLearner.update))
    train("arithmetic_tiny", [*SMALL, "updates=2", f"run={tmp_path / 'run'}"])
    assert did == ["sample", *["rest", "learn", "sample"] * 2]


def test_a_team_that_searches_is_trained_on_what_it_wrote_and_not_on_what_it_found(tmp_path: Path) -> None:
    settings = ["rollout.tasks_per_batch=4", "tasks.eval.size=8", "updates=2", f"run={tmp_path / 'run'}"]
    run = train("search_tiny", settings)
    lines = [line["metrics"] for line in read_metrics(Path(run.run)) if line["kind"] == "update"]
    assert [(line["episodes"], line["steps"], line["event_completeness"]) for line in lines] == [(32, 2, 1.0)] * 2
    log = EventLog(run.run)
    assert {(event.node, len(event.members)) for event in log} == {("search", 3), ("aggregate", 1)}
    calls = [call for event in log for member in event.members for call in member.tool_calls]
    assert any(call.result.startswith("[1] ") and "\nhas " in call.result for call in calls)
    sampled = [event for event in log if event.batch.startswith("update")]
    outputs = sum(len(member.output.output_ids or ()) for event in sampled for member in event.members)
    assert sum(line["tokens_trained"] for line in lines) == outputs


PAIR = """
name: pair
agents:
  solver: {prompt: "{{ task.problem }}", parse: answer}
  second: {prompt: "{{ task.problem }}", policy: second}
nodes: {solve: {agents: [solver, second], next: end}}
answer: solve.outputs[0].parsed
"""
FAILING = """
from srpo_env.errors import PolicyError


def fails(request):
    if request.key.task >= FAILED:
        return "4"
    raise PolicyError("503 after 3 attempts.")
"""


def pair(tmp_path: Path, failed: int) -> TrainResult:
    """Trains on two tasks, the first few of which the second policy fails on."""
    (tmp_path / "failing.py").write_text(FAILING.replace("FAILED", str(failed)), encoding="utf-8")
    (tmp_path / "pair.yaml").write_text(PAIR, encoding="utf-8")
    scripted = f"{{backend: scripted, use: '{tmp_path / 'failing.py'}:fails'}}"
    settings = [f"workflow={tmp_path / 'pair.yaml'}", "tasks.eval.size=2"]
    settings += ["policies.second.model=tiny_arithmetic", f"policies.second.sample={scripted}"]
    return train("arithmetic_tiny", [*settings, "rollout.tasks_per_batch=2", "updates=1", f"run={tmp_path / 'run'}"])


def test_tasks_that_cannot_be_sampled_leave_the_others_of_the_batch(tmp_path: Path) -> None:  # B090
    run = pair(tmp_path, failed=1)
    (line,) = [line["metrics"] for line in read_metrics(Path(run.run)) if line["kind"] == "update"]
    assert (line["policy_errors"], line["unscored"], line["episodes"]) == (8, 8, 16)


def test_a_batch_of_which_nothing_could_be_sampled_ends_the_run(tmp_path: Path) -> None:  # B090
    with pytest.raises(PolicyError, match=r"update 1: none of its 16 episodes .* 503 after 3 attempts\. Mend it"):
        pair(tmp_path, failed=99)


# A router over frozen solvers.


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    folder = tmp_path_factory.mktemp("routed") / "run"
    return train("router_tiny", ["tasks.eval.size=16", "rollout.tasks_per_batch=8", "updates=2", f"run={folder}"])


def test_a_routers_episode_is_scored_less_its_extra_solvers(routed: TrainResult) -> None:
    episodes = EventLog(routed.run).episodes("update-1")
    assert {len(events[1].members) for events in episodes} == {1, 4}
    for events in episodes:
        problem = events[1].members[0].messages[-1].content
        right = events[1].answer == str(sum(map(int, problem.rstrip("=").split("+"))))
        assert events[-1].reward == pytest.approx(right - (0.15 if len(events[1].members) == 4 else 0.0))


def test_what_is_held_out_is_scored_without_the_cost_and_told_of_by_difficulty(routed: TrainResult) -> None:
    held_out = EventLog(routed.run).episodes("eval-2")
    assert {events[-1].reward for events in held_out} <= {0.0, 1.0}
    lines = [line for line in read_metrics(Path(routed.run)) if line["kind"] == "eval" and line["update"] == 2]
    assert [(line.get("set"), line["tasks"]) for line in lines] == [
        ("operations 1", 8),
        ("operations 2", 8),
        (None, 16),
    ]
    for number, line in enumerate(lines[:2], start=1):
        mine = [events for events in held_out if events[-1].task.count("+") == number]
        assert line["members"] == sum(len(event.members) for events in mine for event in events) / 8


def test_only_the_router_learns(routed: TrainResult) -> None:
    assert [path.name for path in Path(routed.checkpoint).iterdir() if path.is_dir()] == ["router"]
    lines = [line["metrics"] for line in read_metrics(Path(routed.run)) if line["kind"] == "update"]
    assert [line["event_completeness"] for line in lines] == [1.0, 1.0]
    assert [line["set_size_mean"] for line in lines] == [1.0, 1.0]
    assert all(1 < line["set_size_without_routers"] < 4 for line in lines)


@pytest.mark.parametrize(("said", "outputs"), [("one", 2.0), ("all", 5.0)])
def test_a_scripted_router_takes_the_place_of_the_trained_one(
    routed: TrainResult, tmp_path: Path, said: str, outputs: float
) -> None:
    scripted = f"policies.router.sample={{backend: scripted, outputs: [{said}]}}"
    found = evaluate(routed.run, [scripted, f"run={tmp_path / 'run'}"])
    assert {name: part.members for name, part in found.by.items()} == {"operations 1": outputs, "operations 2": outputs}
    assert found.macro.members == outputs
