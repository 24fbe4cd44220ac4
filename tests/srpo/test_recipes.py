"""Does every recipe that ships resolve without a model, a network or a GPU, and hold the numbers of its docs?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from srpo_env.cli import run
from srpo_env.config import Recipe, load_recipe, recipe_names
from srpo_env.errors import MissingModel
from srpo_env.jobs import Job
from srpo_env.memory import estimate
from srpo_env.trainers.srpo.config import PRESETS

DOCS = Path(__file__).parents[2] / "docs" / "recipes.md"
MATH, SEARCH = ("math_qwen3_4b", "math_qwen3_8b"), ("search_qwen2.5_3b", "search_qwen2.5_7b")
FULL_SCALE = (*MATH, *SEARCH)
MATH_SETS = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench")
SEARCH_SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")


@pytest.fixture(autouse=True)
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data folder with one task of each set and split, and a hub that can't be reached."""
    for folder, names in (("math", (*MATH_SETS, "dapo_math")), ("search", SEARCH_SETS)):
        (tmp_path / folder).mkdir()
        for name in names:
            row = {"problem": "1+1?", "answer": "2"}
            lines = [json.dumps({"id": split, "split": split, **row}) for split in ("train", "dev", "test")]
            (tmp_path / folder / f"{name}.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("SRPO_ENV_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(params=FULL_SCALE)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return load_recipe(request.param)


def shipped_model_is_here(name: str) -> bool:
    try:
        Job.prepare(name)
    except MissingModel:
        return False
    return True


@pytest.mark.parametrize("name", recipe_names())
def test_a_dry_run_resolves_every_recipe(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not shipped_model_is_here(name):
        pytest.skip("its model is not on this machine; `make smollm2` brings it")
    assert run(["train", name, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "# memory of this process, estimated: " in told
    if name in FULL_SCALE:
        assert "its config.json is not on this machine; `hf download Qwen/" in told
        assert told.count("#   start: VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/") == 4
        assert "--dtype bfloat16 " in told


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["math_qwen3_4b", "search_qwen2.5_3b"])
def test_every_baseline_runs_on_the_same_recipe(name: str, preset: str) -> None:
    clip = ["learner.clip=[3.0e-4, 4.0e-4]"] if preset == "srpo" else []
    length = ["learner.constant_length=4096"] if preset == "dr_grpo" else []
    assert Job.prepare(name, [f"learner.preset={preset}", *clip, *length]).settings.preset == preset


def test_training_is_that_of_the_nearest_peer(recipe: Recipe) -> None:
    main = recipe.policies["main"]
    assert main.train is not None
    how, train, held_out = main.train, recipe.sampling.train, recipe.sampling.eval
    assert (how.lr, how.schedule, how.warmup_updates) == (1e-6, "constant", 0)
    assert (how.weight_decay, how.grad_clip, how.lora) == (0.01, 1.0, None)
    assert (main.dtype, how.autocast) == ("float32", "bfloat16")
    assert (train.temperature, train.top_p, train.top_k) == (1.0, 1.0, 0)
    assert held_out is not None
    assert (held_out.temperature, held_out.top_p, recipe.eval.samples) == (0.6, 0.95, 16)
    learner = Job.prepare(recipe).settings
    assert (learner.preset, learner.clip, learner.length_norm) == ("srpo", (3e-4, 4e-4), "mean")
    assert learner.kl_coefficient == 0
    assert learner.mini_batches * learner.epochs >= 2  # with one update every ratio is 1


def numbers(recipe: Recipe) -> dict[str, Any]:
    sample = recipe.policies["main"].sample.model_extra or {}
    longest = recipe.sampling.train.max_tokens
    return {
        "tasks": recipe.rollout.tasks_per_batch,
        "group": recipe.rollout.group_size,
        "prompt": sample["context_length"] - longest,
        "response": longest,
        "updates": recipe.learner["mini_batches"],
        "penalty": recipe.learner["invalid_penalty"],
        "turns": Job.prepare(recipe).graph.max_steps,
    }


@pytest.mark.parametrize("name", MATH)
def test_the_numbers_of_mathematics(name: str) -> None:
    recipe = load_recipe(name)
    expected = {"tasks": 32, "group": 8, "prompt": 8192, "response": 4096, "updates": 2, "penalty": 0.1, "turns": 4}
    assert numbers(recipe) == expected
    assert recipe.workflow.params == {"rounds": 2}  # solver turns
    assert (recipe.policies["main"].sample.model_extra or {})["template_arguments"] == {"enable_thinking": False}
    assert (recipe.tasks.train.use, recipe.tasks.eval.use) == ("dapo_math", MATH_SETS)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", SEARCH)
def test_the_numbers_of_search(name: str) -> None:
    recipe = load_recipe(name)
    expected = {"tasks": 128, "group": 5, "prompt": 4096, "response": 800, "updates": 5, "penalty": 0.01, "turns": 4}
    assert numbers(recipe) == expected
    assert (recipe.tools["search"].model_extra or {})["top_k"] == 3
    assert recipe.workflow.params["searchers"] == 5
    assert (recipe.tasks.train.use, recipe.tasks.eval.use) == (("nq", "hotpotqa"), SEARCH_SETS)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", FULL_SCALE)
def test_a_recipe_that_was_not_run_says_so(name: str) -> None:
    recipe = load_recipe(name)
    assert "not run here" in recipe.description
    section = DOCS.read_text(encoding="utf-8").partition(f"## {name}\n")[2].partition("\n## ")[0]
    expected = ("Not run here", "Hardware", "Licence", f"hf download {recipe.policies['main'].model}")
    assert [words for words in expected if words not in section] == []


def test_an_estimate_needs_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srpo_env.models.load_model", lambda *_: pytest.fail("a model was loaded"))
    found = estimate(Job.prepare("arithmetic_tiny"))
    assert found is not None
    assert found.weights == 308_736 * 4
