"""Does the package hold its types? Lays the imported tree out as links and checks it there.

Checkers read files, not the package map of pyproject.toml, so build/types/ shows them the tree as it
imports: srpo_env with the wings inside. Editors can read it there too (see CONTRIBUTING.md).
"""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / "build" / "types"


def lay_out() -> None:
    """Links every entry of the core and every wing into a fresh build/types/srpo_env/."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        folders: dict[str, str] = tomllib.load(file)["tool"]["setuptools"]["package-dir"]
    shutil.rmtree(TREE, ignore_errors=True)
    core = TREE / "srpo_env"
    core.mkdir(parents=True)
    for entry in (ROOT / folders.pop("srpo_env")).iterdir():
        (core / entry.name).symlink_to(entry)
    for package, folder in folders.items():
        TREE.joinpath(*package.split(".")).symlink_to(ROOT / folder)


def main() -> int:
    """Runs mypy, and pyright where it is installed; returns 1 if either complains."""
    lay_out()
    config = [
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "--cache-dir",
        str(ROOT / ".mypy_cache"),
    ]
    runs = [[sys.executable, "-m", "mypy", *config, "--strict", "-p", "srpo_env"]]
    if pyright := shutil.which("pyright"):
        runs.append([pyright, "--pythonpath", sys.executable, "srpo_env"])
    return max(subprocess.run(run, cwd=TREE, check=False).returncode for run in runs)


if __name__ == "__main__":
    sys.exit(main())
