"""How many faults would the learner's tests notice? Mutates its mathematics, a change at a time, and runs them.

    make mutants                        # 100 of about 1,600 mutants, drawn at random
    make mutants ARGS="--sample 0"      # all of them: hours

cosmic-ray makes the mutants, in an environment of its own. Each runs in a process that is forked once everything slow
is imported, with the mutant in the module's place; the tree is never changed. A mutant that does not compile, or that
changes annotations alone, is none. Property tests run few examples, so a mutant that survives here may yet be caught.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("objective", "weights", "rows", "estimators", "batch_advantage")
TESTS = [
    f"tests/srpo/test_{name}.py"
    for name in (
        "objective",
        "objective_input",
        "objective_properties",
        "objective_reports",
        "divergence",
        "advantages",
        "penalty",
        "importance",
        "metrics",
    )
]
# Packages are imported before pytest can look into them; and what a docstring shows is looked for in the module's file.
NOT_FOR_MUTANTS = "tests/srpo/test_objective_input.py::test_the_examples_in_the_docstrings_run"
QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning", "--deselect", NOT_FOR_MUTANTS)
LIMIT_S = 180

GENERATE = """
import json, sys
from pathlib import Path
from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

found = []
for path in map(Path, sys.argv[1:]):
    for item in _all_work_items([path], {}):
        (spec,) = item.mutations
        code = mutate_code(path.read_text(), get_operator(spec.operator_name)(), spec.occurrence)
        if code is not None:
            found.append([path.stem, spec.operator_name.partition("/")[2], spec.start_pos[0], code])
json.dump(found, sys.stdout)
"""


@dataclass(frozen=True)
class Mutant:
    """A module with one change."""

    module: str
    operator: str
    line: int
    code: str

    def __str__(self) -> str:
        line = self.code.splitlines()[self.line - 1].strip()
        return f"trainers/srpo/{self.module}.py:{self.line}: {self.operator}: {line}"


class Swap(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the mutant for the module's name."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Where the module comes from, if it is the mutant's."""
        if fullname == f"srpo_env.trainers.srpo.{self._mutant.module}":
            return importlib.util.spec_from_loader(fullname, self, origin="mutant")
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Runs the mutant's code as the module."""
        module.__file__ = str(ROOT / "trainers" / "srpo" / f"{self._mutant.module}.py")
        exec(compile(self._mutant.code, module.__file__, "exec"), module.__dict__)


def mutants(python: str) -> list[Mutant]:
    """All mutants that say something else than the module does."""
    paths = [str(ROOT / "trainers" / "srpo" / f"{name}.py") for name in MODULES]
    made = json.loads(subprocess.run([python, "-c", GENERATE, *paths], check=True, stdout=subprocess.PIPE).stdout)
    plain = {Path(path).stem: _meaning(Path(path).read_text(encoding="utf-8")) for path in paths}
    found = [Mutant(*each) for each in made]
    return [each for each in found if _meaning(each.code) not in (None, plain[each.module])]


def _meaning(code: str) -> str | None:
    """What a source says, annotations aside; None where it does not compile."""
    try:
        tree = ast.parse(code)
        with warnings.catch_warnings(action="ignore"):
            compile(tree, "mutant", "exec")
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        match node:
            case ast.arg():
                node.annotation = None
            case ast.FunctionDef():
                node.returns = None
            case ast.AnnAssign():
                node.annotation = ast.Constant(0)
    return ast.dump(tree)


def survives(mutant: Mutant | None) -> bool:
    """Whether all tests pass with the mutant, or without any."""
    child = os.fork()
    if child == 0:
        os.setpgrp()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        code = 99
        try:
            if mutant is not None:
                sys.meta_path.insert(0, Swap(mutant))
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *QUIET, *TESTS]))
        finally:
            os._exit(code)
    ends = time.monotonic() + LIMIT_S
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.killpg(child, 9)
    os.waitpid(child, 0)
    return False


def main() -> int:
    """Prints each survivor, and the share that was killed; returns 1 below 85%."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="of an environment with cosmic-ray")
    parser.add_argument("--sample", type=int, default=100, help="how many; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found = mutants(arguments.python)
    chosen = random.Random(arguments.seed).sample(found, min(arguments.sample or len(found), len(found)))
    import torch
    import transformers  # noqa: F401 (every process that is forked has them)

    torch.set_num_threads(1)
    os.chdir(ROOT)
    hypothesis.settings.register_profile("few", max_examples=10, deadline=None, database=None)
    hypothesis.settings.load_profile("few")
    os.environ["HYPOTHESIS_PROFILE"] = "few"
    if not survives(None):
        print("the tests fail without any mutant; mend them first", file=sys.stderr)
        return 1
    killed = 0
    for number, mutant in enumerate(chosen, 1):
        if survives(mutant):
            print(f"survived: {mutant}", flush=True)
        else:
            killed += 1
        if number % 20 == 0:
            print(f"{number} of {len(chosen)}: {killed} killed", flush=True)
    print(f"{killed} of {len(chosen)} killed, {killed / len(chosen):.1%}; {len(found)} mutants in all")
    return int(killed < 0.85 * len(chosen))


if __name__ == "__main__":
    sys.exit(main())
