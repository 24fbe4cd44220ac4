"""Does a real language model run through the whole chain? Needs `make smollm2`; run by `make slow`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from srpo_env import EventLog, evaluate, train
from srpo_env.errors import MissingModel
from srpo_env.models import resolve_model
from srpo_env.runs import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def model() -> str:
    try:
        resolve_model("smollm2")
    except MissingModel as error:
        pytest.skip(str(error))
    return "smollm2"


def gsm8k(data_dir: Path, run: Path) -> list[str]:
    """The recipe of the sums, turned into a solver and a verifier on a few grade-school problems."""
    return [
        "workflow={use: solver_verifier, params: {rounds: 1}}",
        f"tasks.train={{use: {data_dir}/math/gsm8k_train_1000.jsonl, limit: 8}}",
        f"tasks.eval={{use: {data_dir}/math/gsm8k_test.jsonl, limit: 4}}",
        "policies.main.sample={backend: local}",
        "sampling.train={max_tokens: 96}",
        "rollout={tasks_per_batch: 2, group_size: 4}",
        "eval={samples: 1}",
        f"run={run}",
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_real_problems_run_through_three_updates(data_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = tmp_path / "run"
    result = train("sums_smollm2", [*gsm8k(data_dir, run), "updates=3"])
    assert (result.updates, result.held_out) == (3, 4)
    events = [event for event in EventLog(run) if event.batch.startswith("update-")]
    assert len(events) == 3 * 2 * 4 * 2
    assert all(member.output.output_ids and member.output.logprobs for event in events for member in event.members)
    updates = [line["metrics"] for line in read_metrics(run) if line["kind"] == "update"]
    assert [each["event_completeness"] for each in updates] == [1.0] * 3
    AutoTokenizer.from_pretrained(Path(result.checkpoint) / "main")
    loaded = AutoModelForCausalLM.from_pretrained(Path(result.checkpoint) / "main")
    assert all(math.isfinite(float(each.detach().abs().max())) for each in loaded.parameters())


def test_real_problems_can_be_evaluated(data_dir: Path, tmp_path: Path) -> None:
    result = evaluate("sums_smollm2", gsm8k(data_dir, tmp_path / "run"))
    assert result.macro.tasks == 4
    assert result.macro.unscored == 0
    assert result.macro.output_tokens > 0
