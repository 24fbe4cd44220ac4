"""Does the command line say what is wrong in one line, exit with the right code and leave nothing behind?"""

import errno
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import srpo_env
from srpo_env.cli import run
from srpo_env.errors import SrpoEnvError, TrainingDiverged
from srpo_env.eventlog import EventLog
from srpo_env.records import Event, Member, Message, Output, Parse

ROOT = Path(__file__).resolve().parents[1]
BROKEN = """\
srpo_env: 1
name: broken
agents:
  solver: {prompt: "{{ task.problem }}", parse: boxed}
nodes:
  solve: {agents: solvr, next: judg}
answer: solve.parsed
"""
# A stub in place of srpo_env.training, so that no model is loaded: `train` is the body of its function.
MAIN = """
import sys, time, types
def train(target, overrides, *, resume, say):
    {body}
sys.modules["srpo_env.training"] = types.SimpleNamespace(train=train)
from srpo_env.cli import main
main()
"""


class Result(BaseModel):
    """What the stubs return."""

    run: str = "runs/x"
    updates: int = 3
    gain: float = float("nan")


class Sampled(BaseModel):
    run: str
    episodes: int = 2
    events: int = 2
    reward_mean: float | None = 0.5


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts functions in the place of a module of the package."""

    def put(module: str, **functions: Any) -> None:
        monkeypatch.setattr(srpo_env, module, types.SimpleNamespace(**functions), raising=False)

    return put


def command(*arguments: str, body: str | None = None) -> list[str]:
    code = "from srpo_env.cli import main; main()" if body is None else MAIN.format(body=body)
    return [sys.executable, "-c", code, *arguments]


# Wrong input: exit code 2, one clear line, nothing on disk.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("train arithmetic_tinny", ["recipe 'arithmetic_tinny' is not known", "Did you mean 'arithmetic_tiny'?"]),
        ("train no_such.yaml", ["recipe 'no_such.yaml' is not known"]),
        ("train sed=1", ["unknown key 'sed'", "Did you mean 'seed'?"]),
        ("train rollout.group_sise=4", ["unknown key 'rollout.group_sise'", "Did you mean 'group_size'?"]),
        ("train seed.x=1", ["seed", "{'x': 1}"]),
        ("train updates=-1", ["updates", "-1"]),
        (
            "train workflow=solver_verifer",
            ["workflow 'solver_verifer' is not known", "Did you mean 'solver_verifier'?"],
        ),
        ("train workflow.params.proposers=0", ["proposers"]),
        ("train tasks.train.use=arithmetik", ["task set 'arithmetik' is not known", "Did you mean 'arithmetic'?"]),
        ("train 'tasks.train={use: missing.jsonl}'", ["task file missing.jsonl", "No such file"]),
        ("train policies.main.sample.backend=locl", ["backend 'locl' is not known", "Did you mean 'local'?"]),
        ("train trainer=srpoo", ["trainer 'srpoo' is not known", "Did you mean 'srpo'?"]),
        ("train 'policies={judge: {model: x}}'", ["policy 'main'", "judge"]),
        ("train arithmetic_tiny second", ["argument 'second'", "key=value"]),
        ("train --seed 1", ["no option '--seed'", "seed=value"]),
        ("train --resum", ["no option '--resum'", "Did you mean '--resume'?"]),
        ("trian", ["no such command 'trian'", "Did you mean 'train'"]),
        ("eval arithmetic_tinny", ["recipe 'arithmetic_tinny' is not known"]),
        ("eval arithmetic_tiny --samples none", ["'--samples'", "integer"]),
        ("eval arithmetic_tiny --samples 0", ["'--samples'", "1"]),
        ("rollout", ["missing argument 'TARGET'"]),
        ("rollout seed=1", ["TARGET is missing"]),
        ("show arithmetic_tinny", ["'arithmetic_tinny'", "Did you mean 'arithmetic_tiny'?"]),
        ("list recipe", ["kind 'recipe' is not known", "Did you mean 'recipes'?"]),
        ("report nowhere", ["nowhere is not a run folder"]),
        ("check", ["missing argument"]),
        ("check solver_verifer", ["workflow 'solver_verifer' is not known"]),
        ("check missing.yaml", ["missing.yaml", "No such file"]),
        ("draw solver_verifer", ["workflow 'solver_verifer' is not known"]),
        ("draw solver_verifier -o x.png", ["output 'x.png'", ".svg"]),
        ("draw solver_verifier -o nowhere/x.mmd", ["output 'nowhere/x.mmd'", "No such file"]),
    ],
)
def test_wrong_input_is_one_clear_line_and_leaves_nothing(
    arguments: str, said: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = run(shlex.split(arguments))
    told = capsys.readouterr()
    assert code == 2
    assert told.out == ""
    assert len(told.err.splitlines()) == 1, told.err
    assert [part for part in said if part not in told.err] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no rows"),
        ("not json\n", "tasks.jsonl:1: not JSON"),
        ('{"id": "1", "problem": "2+2="}\n', "tasks.jsonl:1: no answer"),
        (
            '{"id": "1", "problem": "2+2=", "answer": "4"}\n{"id": "1", "problem": "3+3=", "answer": "6"}\n',
            "tasks.jsonl:2",
        ),
    ],
    ids=["empty", "not JSON", "no answer", "an id twice"],
)
def test_a_bad_task_file_is_named_with_its_line(
    content: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "tasks.jsonl").write_text(content)
    code = run(["train", "tasks.train={use: tasks.jsonl}"])
    told = capsys.readouterr()
    assert code == 2
    assert said in told.err
    assert len(told.err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.jsonl"]


@pytest.mark.parametrize("made", [[], ["config.json"]], ids=["empty", "no weights"])
def test_a_checkpoint_folder_that_is_none_is_refused(
    made: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "checkpoint").mkdir()
    for name in made:
        (tmp_path / "checkpoint" / name).write_text("{}")
    code = run(["train", "policies.main.model=./checkpoint", "run=mine"])
    told = capsys.readouterr()
    assert code == 2
    assert "checkpoint" in told.err
    assert len(told.err.splitlines()) == 1
    assert not (tmp_path / "mine").exists()


def test_a_workflow_with_errors_shows_each_with_its_place(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text(BROKEN)
    for arguments in (["check", "broken.yaml"], ["draw", "broken.yaml"], ["train", "workflow=broken.yaml", "run=mine"]):
        code = run(arguments)
        told = capsys.readouterr()
        assert code == 2
        assert told.out == ""
        assert told.err.splitlines()[0].startswith("broken.yaml:6:")
        assert "'solver'" in told.err
    assert [path.name for path in tmp_path.iterdir()] == ["broken.yaml"]


def test_check_goes_through_all_files_and_tells_the_problems_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "broken.yaml").write_text(BROKEN)
    code = run(["check", "solver_verifier", "broken.yaml", "missing.yaml", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == 2
    assert told["ok"] is False
    assert [len(each["problems"]) > 0 for each in told["files"]] == [False, True, True]
    problem = told["files"][1]["problems"][0]
    assert (problem["file"], problem["line"]) == ("broken.yaml", 6)
    assert problem["message"].startswith("broken.yaml:6:")


def test_check_reads_a_recipe_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    good = "workflow: single_agent\ntasks: {train: {use: arithmetic}}\npolicies:\n  main: {model: tiny_arithmetic}\n"
    (tmp_path / "good.yaml").write_text(good)
    (tmp_path / "bad.yaml").write_text(good.replace("single_agent", "singel_agent"))
    assert run(["check", "good.yaml"]) == 0
    assert "recipe of workflow single_agent" in capsys.readouterr().out
    assert run(["check", "bad.yaml"]) == 2
    assert "Did you mean 'single_agent'?" in capsys.readouterr().err


def test_an_error_with_json_is_also_an_object_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "nope", "--json"]) == 2
    told = capsys.readouterr()
    last = json.loads(told.out.splitlines()[-1])
    assert (last["error"], last["exit_code"]) == ("UnknownName", 2)
    assert "'nope'" in told.err


# What the commands print.


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["-h"], []):
        assert run(arguments) == 0
        told = capsys.readouterr().out
        assert told.startswith("Usage: srpo-env")
        for name in ("train", "rollout", "eval", "check", "draw", "schema", "list", "show", "report"):
            assert f"\n  {name} " in told
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"{srpo_env.__version__}\n"


def test_list_gives_names_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list"]) == 0
    told = capsys.readouterr().out
    names = ("arithmetic_tiny", "router_tiny", "solver_verifier", "arithmetic", "scripted", "tiny_arithmetic")
    for name in (*names, "tiny_router"):
        assert f"  {name} " in told
    assert run(["list", "workflows", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["workflows"]
    assert all(each["name"] and each["about"] for each in listed)


@pytest.mark.parametrize("name", ["arithmetic_tiny", "tiny/solver_verifier"])
def test_what_show_prints_can_be_copied_and_checked(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["show", name]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    assert run(["check", "mine.yaml"]) == 0


def test_draw_prints_mermaid_and_writes_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["draw", "solver_verifier"]) == 0
    drawn = capsys.readouterr().out
    assert drawn.startswith("flowchart TD\n")
    assert run(["draw", "solver_verifier", "-o", "x.mmd"]) == 0
    assert capsys.readouterr().out == "x.mmd\n"
    assert (tmp_path / "x.mmd").read_text().strip() == drawn.strip()
    assert run(["draw", "solver_verifier", "--output", "x.svg"]) == 0
    assert "<svg" in (tmp_path / "x.svg").read_text()


def test_schema_is_a_json_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == 0
    assert "nodes" in json.loads(capsys.readouterr().out)["properties"]


def test_a_dry_run_prints_the_recipe_and_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import yaml

    assert run(["train", "--dry-run", "seed=5", "learner.clip=0.3"]) == 0
    recipe = yaml.safe_load(capsys.readouterr().out)
    assert (recipe["seed"], recipe["learner"]["clip"]) == (5, 0.3)
    assert run(["train", "--dry-run", "--json", "seed=6"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"]["seed"] == 6
    assert list(tmp_path.iterdir()) == []


SERVED = """
from srpo_env.agents import ScriptedPolicy


class Served(ScriptedPolicy):
    @classmethod
    def from_config(cls, label, settings):
        return cls(["4"])

    @classmethod
    def start_commands(cls, label, settings):
        return [f"serve {label} {settings['port']} {settings['model']}"]
"""


def test_a_dry_run_names_the_servers_to_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import yaml

    (tmp_path / "served.py").write_text(SERVED)
    served = f"policies.other={{model: org/name, sample: {{backend: {tmp_path}/served.py:Served, port: 8001}}}}"
    assert run(["train", "--dry-run", served]) == 0
    said = capsys.readouterr().out
    assert "#   start: serve other 8001 org/name\n" in said
    assert "# policy main: tiny_arithmetic, trained, sampled by local\n" in said
    assert yaml.safe_load(said)["policies"]["other"]["sample"]["port"] == 8001
    assert run(["train", "--dry-run", "--json", served]) == 0
    assert json.loads(capsys.readouterr().out)["servers"] == {"other": ["serve other 8001 org/name"]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("workflow=no_such", "no_such"),
        ("tasks.train.use=no_such", "no_such"),
        ("policies.main.model=no_such", "no_such"),
        ("learner.clip=-1", "clip"),
        ("policies.main.sample={backend: local, rows: 3}", "policies.main.sample.rows"),
    ],
)
def test_a_dry_run_finds_what_the_run_would_stumble_over(
    change: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["train", "--dry-run", change]) == 2
    assert said in capsys.readouterr().err


def test_a_dry_run_loads_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srpo_env.agents.local.load_model", lambda *_: pytest.fail("a model was loaded"))
    assert run(["train", "--dry-run"]) == 0


# What the commands hand on, and how they end.


@pytest.mark.parametrize(
    ("arguments", "target", "overrides"),
    [
        ([], "arithmetic_tiny", []),
        (["seed=1"], "arithmetic_tiny", ["seed=1"]),
        (["mine", "seed=1", "learner.clip=[0.1, 0.2]"], "mine", ["seed=1", "learner.clip=[0.1, 0.2]"]),
        (["runs/a=b", "seed=1"], "runs/a=b", ["seed=1"]),
    ],
)
def test_train_parts_the_target_from_the_settings(
    arguments: list[str], target: str, overrides: list[str], stub: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "runs" / "a=b").mkdir(parents=True)
    calls: list[Any] = []

    def train(*given: Any, resume: bool, say: Any) -> Result:
        calls.append((*given, resume))
        return Result()

    stub("training", train=train)
    assert run(["train", *arguments, "--resume"]) == 0
    assert calls == [(target, overrides, True)]


def test_json_keeps_stdout_to_one_object(stub: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    def train(*given: Any, resume: bool, say: Callable[[str], None]) -> Result:
        say("update 1/3  reward 0.5")
        return Result()

    stub("training", train=train)
    assert run(["train", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == {"run": "runs/x", "updates": 3, "gain": None}
    assert told.err == "update 1/3  reward 0.5\n"


def test_rollout_shows_episodes_without_letting_them_steer_the_terminal(
    stub: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with EventLog.writing(tmp_path / "r") as log:
        for at in range(2):
            log.append(event(f"e{at}", "clear \x1b[2J\u202e and \r done"))
    calls: list[Any] = []

    def sample(*given: Any, say: Any, **more: Any) -> Sampled:
        calls.append((given, more))
        return Sampled(run=str(tmp_path / "r"))

    stub("training", sample=sample)
    assert run(["rollout", "single_agent", "--episodes", "2", "--show", "1"]) == 0
    told = capsys.readouterr().out
    assert calls == [(("single_agent", []), {"episodes": 2})]
    assert "clear \\x1b[2J\\u202e and \\r done" in told
    assert told.count("solver[0] ->") == 1
    assert "2 episodes, 2 events, mean reward 0.500" in told


def event(episode: str, text: str) -> Event:
    member = Member(
        agent="solver",
        index=0,
        turn=0,
        policy="main",
        messages=(Message(role="user", content="2+2="),),
        sampling=None,
        output=Output(text=text),
        parse=Parse(ok=True, value="4"),
    )
    return Event(
        run="r",
        task="t",
        group="g",
        episode=episode,
        step=0,
        node="solve",
        visit=0,
        members=(member,),
        next_node="end",
        state_before="a",
        state_after="b",
        reward=1.0,
        terminated=True,
        truncated=False,
    )


def full_disk_in_a_library() -> Exception:
    error = RuntimeError("the writer failed")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device", "checkpoints/model.safetensors")
    return error


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (TrainingDiverged("update 3: the loss is nan."), 1, ["error: update 3: the loss is nan."]),
        (SrpoEnvError("a\nb"), 1, ["a", "b"]),
        (
            OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"),
            1,
            ["error: the disk is full at metrics.jsonl;"],
        ),
        (
            OSError("r: 3 of 99 bytes of event e/0 were written; is the disk full?"),
            1,
            ["error: the disk is full: r: 3 of 99"],
        ),
        (RuntimeError("IoError(Os { code: 28, kind: StorageFull })"), 1, ["error: the disk is full: IoError"]),
        (full_disk_in_a_library(), 1, ["error: the disk is full at checkpoints/model.safetensors;"]),
    ],
    ids=["diverged", "two lines", "full", "short write", "in Rust", "cause"],
)
def test_a_failed_job_is_told_without_a_traceback(
    error: Exception, code: int, lines: list[str], stub: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def train(*given: Any, **more: Any) -> Result:
        error.add_note("The run lies in runs/x.")
        raise error

    stub("training", train=train)
    assert run(["train"]) == code
    told = capsys.readouterr().err.splitlines()
    assert "".join(told).endswith("The run lies in runs/x.")
    assert len(told) == len(lines) + (len(lines) > 1)
    assert all(line.startswith(start) for line, start in zip(told, lines, strict=False))


def test_an_unexpected_error_keeps_its_traceback(stub: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    def train(*given: Any, **more: Any) -> Result:
        raise ZeroDivisionError("division by zero")

    stub("training", train=train)
    assert run(["train"]) == 1
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert told.splitlines()[-1].startswith("error: ZeroDivisionError: division by zero")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_where_it_lies(number: signal.Signals) -> None:
    body = """
    try:
        say("going"); time.sleep(60)
    except BaseException as error:
        error.add_note("The run lies in runs/x."); raise
"""
    process = subprocess.Popen(command("train", body=body), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert err == "interrupted. The run lies in runs/x.\n"


def test_a_second_interrupt_does_not_wait_for_threads() -> None:
    body = """
    import threading; threading.Thread(target=time.sleep, args=(60,)).start()
    say("going"); time.sleep(60)
"""
    process = subprocess.Popen(command("train", body=body), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "interrupted.\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full stands for a full disk and is not there")
def test_a_full_disk_under_stdout_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command("list"), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the disk is full")
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_pipe_ends_quietly() -> None:
    process = subprocess.Popen(command("schema"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_the_encoding_of_a_pipe_stops_nothing() -> None:
    done = subprocess.run(
        command("train", body='say("→ ── é")'),
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\u2192 \\u2500\\u2500 \\xe9\n", "")


def test_colour_and_bars_are_for_a_terminal_only() -> None:
    body = 'say("update 1/3  reward [bold]0.5[/bold] :smile:"); time.sleep(0.7)'
    piped = subprocess.run(command("train", body=body), capture_output=True, text=True, check=True)
    assert piped.stdout == "update 1/3  reward [bold]0.5[/bold] :smile:\n"
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    with subprocess.Popen(command("train", body=body), stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        try:
            while read := os.read(ours, 4096):
                seen += read
        except OSError:  # the terminal is gone once its last process is
            pass
        finally:
            os.close(ours)
    assert process.returncode == 0
    plain = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", seen.decode())
    assert plain != seen.decode()
    assert "reward [bold]0.5[/bold] :smile:" in plain
    assert "━ 1/3" in plain
