"""Do the examples do what they say, and train where they are named in a recipe?"""

from __future__ import annotations

import asyncio
import math
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import srpo_env
from srpo_env import train
from srpo_env.agents import LocalPolicy
from srpo_env.batch import EventBatch
from srpo_env.config import PolicyTraining
from srpo_env.registry import load_reference
from srpo_env.runs import read_metrics
from srpo_env.trainers.srpo import SRPOConfig, SRPOLearner

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ["tasks.eval.size=4", "rollout.tasks_per_batch=4", "updates=2"]


@pytest.mark.parametrize(
    ("key", "name", "setting"),
    [("estimator", "own_advantage.py:rank", "power=2"), ("objective", "own_objective.py:capped", "cap=1.5")],
)
def test_an_own_piece_trains_by_two_overrides_of_a_recipe(tmp_path: Path, key: str, name: str, setting: str) -> None:
    mine = [f"learner.{key}={EXAMPLES / name}", f"learner.{key}_settings.{setting}", f"run={tmp_path / 'run'}"]
    result = train("arithmetic_tiny", [*SMALL, *mine])
    updates = [line["metrics"] for line in read_metrics(Path(result.run)) if line["kind"] == "update"]
    assert [line["steps"] for line in updates] == [2, 2]
    assert all(line["grad_norm"] > 0 for line in updates)


def test_ranks_count_each_episode_once_and_lie_between_minus_1_and_1(make: Any) -> None:
    returns = [0.0, 3.0, 1.0, 1.0, 100.0, None]
    events = [
        make.event(
            [make.member()], episode=f"g/{i}", step=step, reward=each if step == last else 0.0, terminated=step == last
        )
        for i, each in enumerate(returns)
        for last in [2 if i == 0 else 0]
        for step in range(last + 1)
    ]
    rank = load_reference(f"{EXAMPLES / 'own_advantage.py'}:rank")
    batch = EventBatch.from_events(events)
    assert rank(batch).tolist() == pytest.approx([-1, -1, -1, 0.5, -1 / 3, -1 / 3, 1, math.nan], nan_ok=True)
    assert rank(batch, power=2).tolist() == pytest.approx([-1, -1, -1, 0.25, -1 / 9, -1 / 9, 1, math.nan], nan_ok=True)


def test_the_capped_objective_by_hand(make: Any) -> None:
    """Two sets of one token, ratios e and 1; A = 1 and -2; a third is unscored."""
    events = [make.event([make.member([5])], episode=f"g/{i}") for i in range(3)]
    batch = EventBatch.from_events(events)
    old = torch.where(batch.mask, torch.tensor([[-2.0], [-1.0], [-1.0]]), 0.0)
    new = torch.where(batch.mask, -1.0, 0.0).requires_grad_()
    capped = load_reference(f"{EXAMPLES / 'own_objective.py'}:capped")
    batch = replace(batch, old_logprobs=old)
    loss = capped(new, batch, torch.tensor([1.0, -2.0, math.nan]), cap=1.5)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-(1.5 * 1 * -1 + 1 * -2 * -1) / 2)
    assert new.grad is not None
    assert new.grad[:, 2].tolist() == pytest.approx([-0.75, 1, 0])


@pytest.mark.parametrize("name", ["own_advantage", "own_objective"])
def test_an_own_idea_takes_30_lines(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 30


def test_by_hand_ends_with_the_parameters_of_the_learner() -> None:
    log = srpo_env.rollout(
        "tiny/parallel_proposers", policies=LocalPolicy("tiny_arithmetic"), episodes=32, group_size=8
    )
    policies = [LocalPolicy("tiny_arithmetic") for _ in range(2)]
    start = {name: each.detach().clone() for name, each in policies[0].model.named_parameters()}
    config = SRPOConfig(clip=0.2, length_norm="sum", micro_batch_tokens=2048)
    how = PolicyTraining(lr=1e-3)
    SRPOLearner(config, policies[0], training=how, seed=5).update(log.batch())
    update = load_reference(f"{EXAMPLES / 'by_hand.py'}:update")
    optimiser = torch.optim.AdamW(policies[1].model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    assert len(list(update(policies[1].model, optimiser, log.batch(), torch.Generator().manual_seed(5)))) == 2
    expected, found = (dict(each.model.named_parameters()) for each in policies)
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert not any(torch.equal(found[name], each) for name, each in start.items())


def test_by_hand_runs_and_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    load_reference(f"{EXAMPLES / 'by_hand.py'}:main")()
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [f"batch {i}" for i in range(3)]
    assert len((EXAMPLES / "by_hand.py").read_text().splitlines()) <= 120


class Generator(list[dict[str, str]]):
    """Stands for a generator of reasoning-gym, whose verifier gives part of a point for being close."""

    def score_answer(self, answer: str, entry: dict[str, str]) -> float:
        return 1.0 if answer == entry["answer"] else 0.25


def create(name: str, *, size: int, seed: int, digits: int = 1) -> Generator:
    return Generator({"question": f"{name} {seed} {at}", "answer": str(10**digits + at)} for at in range(size))


@pytest.fixture
def reasoning_gym(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "reasoning_gym", types.SimpleNamespace(create_dataset=create))
    return f"{EXAMPLES / 'reasoning_gym_tasks.py'}:tasks"


def test_a_generator_of_reasoning_gym_is_a_task_set_with_its_own_verifier(reasoning_gym: str) -> None:
    found = srpo_env.load_tasks(reasoning_gym, split="test", dataset="sums", size=2, settings={"digits": 3})
    assert [(task.problem, task.answers) for task in found.tasks] == [("sums 1 0", ("1000",)), ("sums 1 1", ("1001",))]
    answers = {r"So \boxed{1001}.": 1.0, "1001": 1.0, r"<think>1001</think> \boxed{7}": 0.25, None: 0.0}
    assert {answer: asyncio.run(found.score(found.tasks[1], answer, ())).value for answer in answers} == answers


def test_the_splits_of_a_generator_have_seeds_of_their_own(reasoning_gym: str) -> None:
    train_set, test_set = (srpo_env.load_tasks(reasoning_gym, split=split, size=1) for split in ("train", "test"))
    assert [each.tasks[0].problem for each in (train_set, test_set)] == ["chain_sum 0 0", "chain_sum 1 0"]
