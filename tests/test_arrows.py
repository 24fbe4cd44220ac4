"""Who imports whom? The core imports no wing, a wing only the core and itself, and nothing is heavy.

tools ──┐
agents ─┼──> srpo_env (core) <── trainers          workflows: data; imports nothing of ours
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WINGS = ("agents", "tools", "trainers", "workflows")
ALLOWED: dict[str, set[str]] = {
    "srpo_env": {"core"},
    "agents": {"core", "agents"},
    "tools": {"core", "tools"},
    "trainers": {"core", "trainers"},
    "workflows": set(),
}
HEAVY = {"matplotlib", "pandas", "scipy", "sympy", "torch", "transformers", "vllm"}

# Runs the command line in this process, then says which heavy packages it loaded.
RUN = f"""
import sys
code = 0
try:
    if sys.argv[1:]:
        from srpo_env.cli import main
        main()
    else:
        import srpo_env
except SystemExit as stop:
    code = stop.code
loaded = {{name.partition(".")[0] for name in sys.modules}} & {HEAVY!r}
print("loaded:", *sorted(loaded))
sys.exit(code)
"""


def imported(source: str) -> Iterator[str]:
    """Dotted names of all that a source imports, wherever in it and for types only or not."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.ImportFrom():
                yield "srpo_env.(relative)"


def part(name: str) -> str | None:
    """The part of the project that a dotted name lies in: a wing or `core`; None if in none."""
    match name.split("."):
        case ["srpo_env", wing, *_] if wing in WINGS:
            return wing
        case ["srpo_env", *_]:
            return "core"
        case _:
            return None


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("import srpo_env.agents.local", {"agents"}),
        ("from srpo_env import agents, records", {"agents", "core"}),
        ("def f():\n    from srpo_env.trainers.srpo import recipes", {"trainers"}),
        ("import agents, toolsmith\nimport torch", set()),
        ("import srpo_env", {"core"}),
    ],
)
def test_the_walk_finds_every_way_to_import(source: str, parts: set[str]) -> None:
    assert {part(name) for name in imported(source)} - {None} == parts


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_follow_the_arrows(folder: str) -> None:
    sources = sorted((ROOT / folder).rglob("*.py"))
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources
        for name in imported(path.read_text(encoding="utf-8"))
        if part(name) not in {None, *ALLOWED[folder]}
    ]
    assert sources
    assert wrong == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["check", str(ROOT / "workflows" / "solver_verifier.yaml")],
        ["draw", str(ROOT / "workflows" / "solver_verifier.yaml")],
    ],
    ids=["import srpo_env", "--help", "check", "draw"],
)
def test_nothing_heavy_is_loaded_by(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"
