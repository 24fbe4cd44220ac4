"""Does pyproject.toml say what lies on disk, and does the import map hold?"""

import ast
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]
# Not workflows: it is data with one function that says where it lies, and imports nothing of ours.
WINGS = [name for name in FOLDERS if name not in {"srpo_env", "srpo_env.workflows"}]
INITS = [path for name in WINGS for path in sorted((ROOT / FOLDERS[name]).rglob("__init__.py"))]


def packages_on_disk() -> dict[str, Path]:
    """Import name and folder of every folder that holds Python."""
    found = {}
    for name, folder in FOLDERS.items():
        for path in sorted({file.parent for file in (ROOT / folder).rglob("*.py")}):
            found[".".join([name, *path.relative_to(ROOT / folder).parts])] = path
    return found


def re_exports(statement: ast.stmt) -> bool:
    """Whether a statement hands names on: an import, `__all__`, or a lazy import's hook."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.FunctionDef(name="__getattr__" | "__dir__"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body, orelse=[]):
            return all(map(re_exports, body))
    return False


def test_the_packages_listed_are_the_folders_that_hold_python() -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages_on_disk())


def test_every_package_has_an_init() -> None:
    missing = [name for name, path in packages_on_disk().items() if not (path / "__init__.py").exists()]
    assert not missing


@pytest.mark.parametrize("path", INITS, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_init_only_re_exports(path: Path) -> None:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    assert [ast.unparse(statement) for statement in body if not re_exports(statement)] == []


def test_every_data_file_is_packaged() -> None:
    packaged = {
        path
        for name, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        for path in packages_on_disk()[name].glob(pattern)
    }
    on_disk = {
        path
        for folder in FOLDERS.values()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert on_disk <= packaged


def test_the_weights_that_ship_stay_small() -> None:
    models = ROOT / FOLDERS["srpo_env.agents"] / "models"
    sizes = {each.name: sum(file.stat().st_size for file in each.iterdir()) for each in models.iterdir()}
    assert max(sizes.values()) < 2 * 1000**2
    assert sum(sizes.values()) < 3 * 1000**2


def test_coverage_measures_all_five_folders() -> None:
    assert sorted(PROJECT["tool"]["coverage"]["run"]["source"]) == sorted(FOLDERS.values())


def test_every_pin_lies_in_its_range_and_nothing_we_ask_for_is_unpinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [
        *PROJECT["project"]["dependencies"],
        *extras["dev"],
        *extras["test"],
        *extras["smollm2"],
        *extras["accelerate"],
        *extras["datasets"],
        *extras["lora"],
    ]
    for requirement in map(Requirement, asked):
        if requirement.name != PROJECT["project"]["name"]:
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("group", PROJECT["project"]["entry-points"])
def test_every_entry_point_leads_somewhere(group: str) -> None:
    declared = PROJECT["project"]["entry-points"][group]
    installed = {
        point.name: point
        for point in entry_points(group=group)
        if point.dist and point.dist.name == PROJECT["project"]["name"]
    }
    assert {name: point.value for name, point in installed.items()} == declared
    for point in installed.values():
        assert point.load() is not None


def test_the_repository_root_is_not_importable() -> None:
    assert ROOT not in [Path(entry).resolve() for entry in sys.path]


def test_the_learners_package_gives_what_its_names_promise() -> None:
    from srpo_env.trainers.srpo import SRPOConfig, SRPOLearner, advantages, recipes, srpo_loss

    assert all(map(callable, (SRPOConfig, SRPOLearner, advantages, recipes, srpo_loss)))
