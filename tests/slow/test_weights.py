"""Are the weights that ship those that their scripts make, to the bit? Run by `make slow`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from srpo_env.models import resolve_model

pytestmark = pytest.mark.slow

DEV = Path(__file__).resolve().parents[2] / "dev"


MADE = {"make_tiny": "tiny_arithmetic", "make_router": "tiny_router", "make_tiny_search": "tiny_search"}


@pytest.mark.parametrize(("script", "model"), MADE.items())
def test_a_script_makes_the_weights_that_ship(script: str, model: str, tmp_path: Path) -> None:
    command = [sys.executable, str(DEV / f"{script}.py"), str(tmp_path / "made")]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    shipped = Path(resolve_model(model))
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == sorted(
        path.name for path in shipped.iterdir()
    )
    for path in shipped.iterdir():
        assert (tmp_path / "made" / path.name).read_bytes() == path.read_bytes(), path.name
