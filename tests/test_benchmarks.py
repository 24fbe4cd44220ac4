"""Do the benchmarks still fit the code? What they measure is not asked here."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_what_the_benchmark_of_the_whole_loop_watches_is_there() -> None:
    spec = importlib.util.spec_from_file_location("whole_loop", ROOT / "benchmarks" / "whole_loop.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    gone = [f"{owner.__name__}.{name}" for owner, name, _ in module.parts() if not hasattr(owner, name)]
    assert gone == []
