"""Does every name lead to its object, or to a message that says what would?"""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from srpo_env import registry
from srpo_env.errors import InvalidInput, MissingExtra, UnknownName
from srpo_env.registry import GROUPS, is_reference, load, load_reference


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool of a package that needs another one, which is not there."""
    points = {"needy": EntryPoint("needy", "no_such_package.tools:Needy", GROUPS["tool"])}
    monkeypatch.setattr(registry, "registered", lambda kind: points)


def test_a_registered_name_gives_its_object() -> None:
    from srpo_env.arithmetic import arithmetic

    assert load("task set", "arithmetic") is arithmetic


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"task set 'arithmetik' is not known; known are .*Did you mean 'arithmetic'"):
        load("task set", "arithmetik")


def test_a_missing_package_is_named(installed: None) -> None:
    with pytest.raises(MissingExtra, match="tool 'needy' needs the package 'no_such_package', which is not installed"):
        load("tool", "needy")


@pytest.mark.parametrize(
    ("name", "reference"), [("majority", False), ("a.b:c", True), ("./f.py:c", True), ("f.py", False)]
)
def test_a_reference_has_a_colon(name: str, reference: bool) -> None:
    assert is_reference(name) is reference


def test_a_reference_gives_the_attribute_of_a_module() -> None:
    assert load_reference("os.path:sep.join") is not None


def test_a_reference_gives_the_attribute_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class A:\n    x = 3\n")
    assert load_reference(f"{tmp_path}/own.py:A.x") == 3


def test_a_file_is_run_once(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("x = object()\n")
    assert load_reference(f"{tmp_path}/own.py:x") is load_reference(f"{tmp_path}/own.py:x")


def test_a_path_is_relative_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("x = 3\n")
    monkeypatch.chdir(tmp_path)
    assert load_reference("./own.py:x") == 3


@pytest.mark.parametrize(
    "reference", ["no_such_module:x", "os:no_such_attribute", "./none.py:x", ":x", "os:", "os.path:sep.nothing"]
)
def test_a_reference_that_leads_nowhere_is_named(reference: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{reference!r} can't be loaded"):
        load_reference(reference)


def test_a_file_that_raises_can_be_mended_and_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("raise RuntimeError('own')\n")
    with pytest.raises(RuntimeError, match="own"):
        load_reference(f"{path}:x")
    path.write_text("x = 3  # and longer, so that no cached bytecode is taken for it\n")
    assert load_reference(f"{path}:x") == 3
