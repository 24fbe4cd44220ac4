"""What every test shares: the import path, the property-test profiles and the data folder."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# `agents`, `tools`, ... in the root would answer to bare names, which are other distributions'.
ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]

settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True)
settings.register_profile("figures", max_examples=10_000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of the large data files, which do not lie in the repository."""
    folder = os.environ.get("SRPO_ENV_DATA")
    if not folder:
        pytest.skip("SRPO_ENV_DATA is not set: it names the folder of the large data files")
    if not Path(folder).is_dir():
        pytest.fail(f"SRPO_ENV_DATA is '{folder}', which is not a folder")
    return Path(folder)
