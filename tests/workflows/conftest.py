"""What the tests of workflows share: problems of a text, and the generators beside this file."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from srpo_env.loading import load_workflow
from srpo_env.problems import InvalidWorkflowFile, Problem

Problems = Callable[[str], tuple[Problem, ...]]


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Problems:
    """Returns the problems of a workflow's text; none for one that loads."""
    file = tmp_path_factory.mktemp("workflows") / "file.yaml"

    def problems_of(text: str) -> tuple[Problem, ...]:
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            load_workflow(file)
        except InvalidWorkflowFile as error:
            return error.problems
        return ()

    return problems_of


def _beside(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"workflow_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def mutations() -> ModuleType:
    """The generator of wrong files."""
    return _beside("mutations")


@pytest.fixture(scope="session")
def single_faults() -> ModuleType:
    """The generator of files with one fault."""
    return _beside("single_faults")


@pytest.fixture(scope="session")
def readme() -> ModuleType:
    """The writer of the pictures in workflows/README.md."""
    return _beside("readme")
