"""Are the weights of `search_tiny` those that their script makes?"""

import subprocess
import sys
from pathlib import Path

import pytest

from srpo_env.agents import tiny

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def test_the_script_makes_the_weights_that_ship_to_the_bit(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "dev" / "make_tiny_search.py", tmp_path], check=True, timeout=3600)
    shipped = {path.name: path.read_bytes() for path in tiny.search().iterdir()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == shipped
