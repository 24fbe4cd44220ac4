"""What a user types: the commands, their one-line errors and their exit codes.

0 done, 1 the job failed, 2 the input is wrong, 130 interrupted.

Whatever is heavy is imported by the command that needs it, so that `--help`, `check` and `draw` answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import BaseModel

from srpo_env.catalogue import KINDS, names_of, yaml_files
from srpo_env.errors import InvalidInput, InvalidWorkflow, SrpoEnvError, UnknownName, nearest
from srpo_env.tables import aligned

DEFAULT_RECIPE = "arithmetic_tiny"

Say = Callable[[str], None]

app = typer.Typer(
    name="srpo-env",
    help="Teams of language-model agents as graphs, environments and training data. Begin with: srpo-env train",
    epilog="Settings of a recipe are written key=value: srpo-env train arithmetic_tiny seed=1 learner.clip=0.2",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout; what is told on the way goes to stderr.")
]
Settings = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings of the recipe, such as seed=1.")
]


# Entry and exit.


def main() -> NoReturn:
    """Runs the command line and exits."""
    # The threads of torch spin while they wait, which starves whatever else runs on a small machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    # Whoever is in charge of Ctrl-C by then (asyncio, while a loop runs) gets SIGTERM too.
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code; errors are told on stderr.

    >>> run(["list", "workflow"])
    2
    """
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")
    as_json = "--json" in arguments
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except _UsageError as error:
        return _fail(2, error, _usage(error), as_json)
    except InvalidInput as error:
        return _fail(2, error, str(error), as_json)
    except SrpoEnvError as error:
        return _fail(1, error, str(error), as_json)
    except KeyboardInterrupt as error:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: os._exit(130))  # the next one doesn't wait for threads
        return _fail(130, error, "interrupted.", as_json, prefix="")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the exit flushes, and complains
        return 1
    except Exception as error:  # noqa: BLE001 - the outermost handler: it ends the process
        if line := _disk_trouble(error):
            return _fail(1, error, line, as_json)
        traceback.print_exc()
        return _fail(
            1, error, f"{type(error).__name__}: {error} (unexpected: please report it with the lines above)", as_json
        )
    return code


def _dispatch(arguments: Sequence[str]) -> int:
    """Runs the command; not by typer's own `main`, which swallows interrupts and whatever was noted on them."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("srpo-env", list(arguments) or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as stop:
        return int(stop.exit_code)
    return 0


_UsageError: Any = typer.BadParameter.__mro__[1]
"""Typer carries its own copy of click in new releases, so the class is found where both have it."""


def _fail(code: int, error: BaseException, message: str, as_json: bool, prefix: str = "error: ") -> int:
    """Tells an error, and what the raiser noted about it, such as where the run lies; returns the code."""
    lines = message.splitlines() or [type(error).__name__]
    if len(lines) == 1:
        lines = [prefix + " ".join([*lines, *getattr(error, "__notes__", ())])]
    else:
        lines += getattr(error, "__notes__", ())
    with contextlib.suppress(OSError):
        if as_json:
            _print_json({"error": type(error).__name__, "message": message, "exit_code": code})
            sys.stdout.flush()
    for line in lines:
        print(_printable(line), file=sys.stderr)
    return code


def _usage(error: Any) -> str:
    """A mistake in the use of an option or a command, as one line with the nearest name."""
    message = " ".join(error.format_message().split())
    option = getattr(error, "option_name", None)
    if option is not None and message.startswith("No such option"):
        message = f"no option {option!r}.{nearest(option, error.possibilities or ())}"
        key = option.lstrip("-").replace("-", "_")
        if key.partition(".")[0] in _recipe_keys():
            message += f" A setting of the recipe is written {key}=value, without dashes."
    command = error.ctx.command_path if error.ctx is not None else "srpo-env"
    end = "" if message.endswith(("?", ".")) else "."
    return f"{message[:1].lower()}{message[1:]}{end} See `{command} --help`."


def _recipe_keys() -> list[str]:
    from srpo_env.config import Recipe

    return list(Recipe.model_fields)


def _disk_trouble(error: BaseException) -> str | None:
    """One line for a full disk, however deep in a library it was met; None for another error."""
    cause: BaseException | None = error
    while cause is not None:
        number = getattr(cause, "errno", None)
        full = (
            number in (errno.ENOSPC, errno.EDQUOT)
            or "No space left on device" in str(cause)
            or "StorageFull" in str(cause)
        )
        if full or (isinstance(cause, OSError) and "is the disk full?" in str(cause)):
            where = getattr(cause, "filename", None)
            at = f" at {where}" if where else "" if number else f": {' '.join(str(cause).split())}"
            return f"the disk is full{at}; what was written before is kept. Make room and run the same command again."
        cause = cause.__cause__ or cause.__context__
    return None


# What commands share.


def _parted(target: str | None, settings: Sequence[str] | None, default: str | None = None) -> tuple[str, list[str]]:
    """Returns TARGET and the overrides; where TARGET was left out, the first override stands in its place."""
    overrides = list(settings or ())
    if target is not None and "=" in target and not Path(target).exists():
        overrides.insert(0, target)
        target = None
    for text in overrides:
        if "=" not in text:
            raise InvalidInput(
                f"argument {text!r}: only one TARGET is taken; settings are written key=value, such as seed=1."
            )
    target = target or default
    if target is None:
        raise InvalidInput(
            "TARGET is missing: give a recipe, a workflow (see `srpo-env list`), a file or a run folder first."
        )
    return target, overrides


@contextlib.contextmanager
def _talking(as_json: bool) -> Iterator[Say]:
    """Gives a function that prints a line: plainly in a pipe, on a terminal above a bar that follows `update 3/80`."""
    stream = sys.stderr if as_json else sys.stdout
    if not stream.isatty():
        yield lambda line: print(_printable(line), file=stream, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    console = Console(file=stream)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as progress:
        bar = progress.add_task("updates", total=None, visible=False)

        def say(line: str) -> None:
            console.print(_printable(line), markup=False, emoji=False, soft_wrap=True)
            if found := re.match(r"\s*update\s+(\d+)\s*(?:/|of)\s*(\d+)", line):
                progress.update(bar, completed=int(found[1]), total=int(found[2]), visible=found[1] != found[2])

        yield say


def _printable(text: str) -> str:
    """Text of a model or a file must not steer the terminal: control and direction characters are shown as escapes."""
    return re.sub(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]",
        lambda found: found[0].encode("unicode_escape").decode(),
        text,
    )


def _print_json(value: Any) -> None:
    print(json.dumps(_plain(value), ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    """As data that JSON has: models as mappings, and null for numbers that are not finite."""
    match value:
        case BaseModel():
            return _plain(value.model_dump(mode="json"))
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case float() if not math.isfinite(value):
            return None
        case Path():
            return str(value)
    return value


# The commands.


def _print_version(wanted: bool) -> None:
    if wanted:
        from srpo_env import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: srpo-env train arithmetic_tiny seed=1 updates=20 run=runs/mine")
def train(
    target: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help=f"A recipe (default: {DEFAULT_RECIPE}), a recipe file or a run folder."),
    ] = None,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, the servers to start and the recipe; run nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a team by a recipe, and write a report."""
    target, overrides = _parted(target, settings, DEFAULT_RECIPE)
    if dry_run:
        from srpo_env.dry_run import DryRun

        found = DryRun.of(target, overrides)
        if as_json:
            _print_json(found)
        else:
            sys.stdout.write(str(found))
        return
    from srpo_env import training

    with _talking(as_json) as say:
        result = training.train(target, overrides, resume=resume, say=say)
    if as_json:
        _print_json(result)


@app.command(epilog="Example: srpo-env rollout tiny/parallel_proposers --episodes 16 --show 2")
def rollout(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A recipe or workflow, a file or a run folder.")],
    settings: Settings = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="How many; default: one batch of the recipe.")] = None,
    show: Annotated[int, typer.Option(min=0, metavar="N", help="Print the first N episodes.")] = 0,
    as_json: Json = False,
) -> None:
    """Run episodes and log their events; nothing is trained."""
    target, overrides = _parted(target, settings)
    from srpo_env import training

    with _talking(as_json) as say:
        result = training.sample(target, overrides, episodes=episodes, say=say)
        if show:
            _show_episodes(Path(result.run), show, say)
        mean = "not scored" if result.reward_mean is None else f"{result.reward_mean:.3f}"
        say(f"{result.episodes} episodes, {result.events} events, mean reward {mean}: {result.run}")
    if as_json:
        _print_json(result)


def _show_episodes(run: Path, count: int, say: Say) -> None:
    from itertools import islice

    from srpo_env.eventlog import EventLog
    from srpo_env.transcript import as_text

    for events in islice(EventLog(run).episodes(), count):
        say(f"episode {events[0].episode}, task {events[0].task}")
        say(as_text(events) + "\n")


@app.command(name="eval", epilog="Example: srpo-env eval runs/mine --samples 16")
def evaluate(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A recipe, a file or a run folder.")],
    settings: Settings = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Episodes of each task; default: the recipe's.")] = None,
    as_json: Json = False,
) -> None:
    """Try a team on held-out tasks."""
    target, overrides = _parted(target, settings)
    from srpo_env import evaluation

    with _talking(as_json) as say:
        result = evaluation.evaluate(target, overrides, samples=samples, say=say)
    if as_json:
        _print_json(result)


@app.command()
def check(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Workflows or recipes: files or names.")],
    as_json: Json = False,
) -> None:
    """Check workflows and recipes; name every problem."""
    found = [(file, *_checked(file)) for file in files]
    if as_json:
        _print_json(
            {
                "ok": not any(problems for _, _, problems in found),
                "files": [{"file": file, "problems": problems} for file, _, problems in found],
            }
        )
    for file, summary, problems in found:
        for problem in problems:
            print(_printable(problem["message"]), file=sys.stderr)
        if not problems and not as_json:
            print(f"{file}: no problem\n{summary}")
    if any(problems for _, _, problems in found):
        raise typer.Exit(2)


def _checked(file: str) -> tuple[str, list[dict[str, Any]]]:
    """Returns what a file is, in words, and its problems."""
    try:
        return _described(file), []
    except InvalidWorkflow as error:
        if problems := getattr(error, "problems", ()):
            return "", [{**asdict(problem), "message": str(problem)} for problem in problems]
        return "", [{"file": file, "message": line} for line in str(error).splitlines()]
    except InvalidInput as error:
        return "", [{"file": file, "message": line} for line in str(error).splitlines()]


def _described(file: str) -> str:
    if _is_recipe(file):
        from srpo_env.config import load_recipe

        recipe = load_recipe(file)
        assert not isinstance(recipe.workflow, str)
        _described(recipe.workflow.use)
        return f"recipe of workflow {recipe.workflow.use}, {recipe.updates} updates"
    from srpo_env.describing import describe
    from srpo_env.graph import compile_graph
    from srpo_env.loading import load_workflow

    return str(describe(compile_graph(load_workflow(file))))


def _is_recipe(file: str) -> bool:
    """Whether it is a recipe: one that ships, or a file that names policies, which a workflow can't."""
    from srpo_env.config import recipe_names

    if file in recipe_names():
        return True
    try:
        return any(line.startswith("policies:") for line in Path(file).read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        return False


@app.command()
def draw(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A workflow: a file or a name.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file: .mmd or .svg.")] = None,
    as_json: Json = False,
) -> None:
    """Draw a workflow as Mermaid text or SVG."""
    from srpo_env import draw as drawing
    from srpo_env.graph import compile_graph
    from srpo_env.loading import load_workflow

    makers = {".mmd": drawing.draw_mermaid, ".svg": drawing.draw_svg}
    make = makers.get(output.suffix if output else ".mmd")
    if make is None:
        raise InvalidInput(
            f"output {str(output)!r}: a drawing is {' or '.join(makers)}; give the file one of these endings."
        )
    drawn = make(compile_graph(load_workflow(file)))
    if output is not None:
        _write(output, drawn)
    if as_json:
        _print_json({"file": file, "output": output, "drawing": drawn})
    elif output is None:
        print(drawn.rstrip("\n"))
    else:
        print(output)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise InvalidInput(
            f"output {str(path)!r} can't be written: {error.strerror}; give a file in a folder of yours."
        ) from error


@app.command()
def schema(as_json: Json = False) -> None:
    """Print the JSON Schema of workflow files, for editors."""
    from srpo_env.spec import schema as workflow_schema

    if as_json:
        _print_json(workflow_schema())
    else:
        print(json.dumps(workflow_schema(), indent=2, ensure_ascii=False))


@app.command(name="list")
def list_names(
    kind: Annotated[
        str | None, typer.Argument(metavar="KIND", help=f"One of: {', '.join(KINDS)}; default: all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the names that can be used."""
    if kind is not None and kind not in KINDS:
        raise UnknownName(f"kind {kind!r} is not known; known are {', '.join(KINDS)}.{nearest(kind, KINDS)}")
    found = {each: names_of(each) for each in ([kind] if kind else KINDS)}
    if as_json:
        _print_json(
            {each: [dict(zip(("name", "about"), row, strict=True)) for row in rows] for each, rows in found.items()}
        )
        return
    for each, rows in found.items():
        if kind is None:
            print(each)
        for line in aligned(rows, "" if kind else "  ") if rows else ["  (none)"]:
            print(_printable(line))


@app.command()
def show(name: Annotated[str, typer.Argument(help="A recipe or workflow that ships.")], as_json: Json = False) -> None:
    """Print a recipe or workflow, to copy and change."""
    recipes, workflows = yaml_files("recipes"), yaml_files("workflows")
    path = recipes.get(name) or workflows.get(name)
    if path is None:
        known = [*recipes, *workflows]
        raise UnknownName(
            f"{name!r} is neither a recipe ({', '.join(recipes)}) nor a workflow ({', '.join(workflows)})."
            f"{nearest(name, known)} `srpo-env list` says what they are."
        )
    if name in recipes and name in workflows:
        print(
            f"{name} is a recipe and a workflow; this is the recipe. The workflow: {workflows[name]}", file=sys.stderr
        )
    text = path.read_text(encoding="utf-8")
    if as_json:
        _print_json({"name": name, "file": path, "yaml": text})
    else:
        sys.stdout.write(text)


@app.command()
def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")], as_json: Json = False
) -> None:
    """Write a run's report anew, one HTML file."""
    from srpo_env.report import write_report

    path = write_report(run_folder)
    if as_json:
        _print_json({"run": run_folder, "report": path})
    else:
        print(path)


@app.command(epilog="Example: srpo-env serve retriever corpus=wiki.jsonl port=8000")
def serve(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to serve; see `srpo-env list servers`.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings of the server, such as port=8001.")
    ] = None,
) -> None:
    """Serve a tool to other processes and machines, until Ctrl-C."""
    from srpo_env.config import read_overrides
    from srpo_env.registry import load

    load("server", name)(dict(read_overrides(settings or ())))


if __name__ == "__main__":
    main()
