"""Does the built wheel work for a stranger? Run by .ci/run in a clean venv, outside the checkout."""

import importlib
import json
import subprocess
import sys
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

import pytest

import srpo_env

pytestmark = pytest.mark.wheel

PACKAGES = ["agents", "tools", "trainers", "trainers.srpo", "workflows"]


def srpo_env_command(*arguments: str, cwd: Path) -> str:
    """What the installed command prints; fails where it does not exit with 0."""
    command = [str(Path(sys.executable).with_name("srpo-env")), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_package_under_test_is_the_installed_one() -> None:
    assert Path(srpo_env.__file__).is_relative_to(sys.prefix)


def test_the_distribution_owns_no_name_but_its_own() -> None:
    owned = {
        path.parts[0]
        for path in distribution("srpo-env").files or ()
        if path.name != "srpo-env"  # the command, which lies in bin/
    }
    assert owned == {"srpo_env", f"srpo_env-{distribution('srpo-env').version}.dist-info"}


@pytest.mark.parametrize("name", PACKAGES)
def test_every_package_is_importable(name: str) -> None:
    package = importlib.import_module(f"srpo_env.{name}")
    assert package.__file__
    assert Path(package.__file__).is_relative_to(sys.prefix)


@pytest.mark.parametrize(
    ("package", "pattern"),
    [
        ("srpo_env", "py.typed"),
        ("srpo_env.agents", "models/*/*.safetensors"),
        ("srpo_env.trainers.srpo", "recipes/*.yaml"),
        ("srpo_env.workflows", "*.yaml"),
    ],
)
def test_data_files_come_along(package: str, pattern: str) -> None:
    assert list(Path(str(files(package))).glob(pattern))


def test_the_command_says_how_it_is_used(tmp_path: Path) -> None:
    assert "train" in srpo_env_command("--help", cwd=tmp_path)


def test_what_ships_is_listed(tmp_path: Path) -> None:
    listed = srpo_env_command("list", cwd=tmp_path)
    assert "arithmetic_tiny" in listed
    assert "solver_verifier" in listed


def test_a_shipped_workflow_passes_its_check(tmp_path: Path) -> None:
    workflow = files("srpo_env.workflows") / "solver_verifier.yaml"
    srpo_env_command("check", str(workflow), cwd=tmp_path)


def test_one_update_runs_from_the_command_line(tmp_path: Path) -> None:
    arguments = ["train", "arithmetic_tiny", "updates=1", "run=one_update", "--json"]
    printed = srpo_env_command(*arguments, cwd=tmp_path)
    assert json.loads(printed.splitlines()[-1])["updates"] == 1
