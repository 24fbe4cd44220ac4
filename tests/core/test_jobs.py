"""Does a recipe become the right batches, and is what is wrong with it found before anything is written?"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srpo_env.config import Recipe, RolloutUse
from srpo_env.errors import InvalidInput, InvalidRecipe, UnknownName
from srpo_env.eventlog import EventLog
from srpo_env.jobs import Job
from srpo_env.records import Event
from srpo_env.runs import Run
from srpo_env.tasks import Task, load_tasks


def recipe_of(**values: Any) -> Recipe:
    given: dict[str, Any] = {
        "workflow": "single_agent",
        "tasks": {"train": {"use": "arithmetic", "size": 8}},
        "policies": {"main": {"sample": {"backend": "scripted", "outputs": ["4"]}}},
    }
    return Recipe.model_validate(given | values)


@pytest.fixture(scope="module")
def job() -> Job:
    """A job on eight tasks with a policy that always says 4."""
    return Job.prepare(recipe_of())


def with_tasks(job: Job, count: int, size: int, seed: int = 0) -> Job:
    tasks = load_tasks([Task(id=str(i), problem="?", answers=("4",)) for i in range(count)])
    changed = {"rollout": RolloutUse(tasks_per_batch=size, group_size=3), "seed": seed}
    return Job(**{**vars(job), "tasks": tasks, "held_out": tasks, "recipe": job.recipe.model_copy(update=changed)})


# Batches of tasks.


def test_each_task_comes_once_per_epoch(job: Job) -> None:
    mine = with_tasks(job, count=8, size=4)
    first, second = ([task.id for task in mine.batch_of_tasks(update)] for update in (1, 2))
    assert sorted(first + second) == [str(i) for i in range(8)]


@settings(max_examples=settings.default.max_examples // 2)
@given(count=st.integers(1, 12), size=st.integers(1, 12), seed=st.integers(0, 3))
def test_over_many_batches_no_task_is_ahead_by_more_than_one(job: Job, count: int, size: int, seed: int) -> None:
    mine = with_tasks(job, count, size, seed)
    seen = Counter({str(i): 0 for i in range(count)})
    for update in range(1, 6):
        seen.update(task.id for task in mine.batch_of_tasks(update))
        assert max(seen.values()) - min(seen.values()) <= 1


def test_a_batch_depends_on_seed_and_update_alone(job: Job) -> None:
    assert with_tasks(job, 8, 4).batch_of_tasks(7) == with_tasks(job, 8, 4).batch_of_tasks(7)
    assert with_tasks(job, 8, 4).batch_of_tasks(7) != with_tasks(job, 8, 4, seed=1).batch_of_tasks(7)


def test_epochs_differ_in_order(job: Job) -> None:
    mine = with_tasks(job, count=50, size=50)
    assert mine.batch_of_tasks(1) != mine.batch_of_tasks(2)


# Sampling.


def test_an_update_samples_the_group_of_each_of_its_tasks(job: Job, tmp_path: Path) -> None:
    mine = with_tasks(job, count=8, size=4)
    with Run.create(mine.recipe.model_copy(update={"run": str(tmp_path / "run")}), "r") as run:
        episodes = mine.sample(run, 2)
    found = Counter(each[-1].task for each in episodes)
    assert found == {task.id: 3 for task in mine.batch_of_tasks(2)}
    assert {each.batch for each in EventLog(run.folder)} == {"update-2"}
    assert {each.run for each in EventLog(run.folder)} == {"run"}


@pytest.mark.parametrize("count", [3, 10])
def test_evaluation_tries_every_task_the_last_ones_too(job: Job, tmp_path: Path, count: int) -> None:
    mine = with_tasks(job, count=count, size=4)
    with Run.create(mine.recipe.model_copy(update={"run": str(tmp_path / "run")}), "r") as run:
        team, baseline = mine.try_held_out(run, update=0, samples=2)
    assert Counter(events[-1].task for events in team) == {str(i): 2 for i in range(count)}
    assert baseline is None


def test_a_baseline_is_tried_beside_the_team(tmp_path: Path) -> None:
    mine = Job.prepare(recipe_of(workflow="parallel_proposers", eval={"baseline": "single_agent"}))
    with Run.create(mine.recipe.model_copy(update={"run": str(tmp_path / "run")}), "r") as run:
        team, baseline = mine.try_held_out(run, update=3, samples=1)
    assert [len(events[0].members) for events in team] == [3] * 8
    assert baseline is not None
    assert [len(events[0].members) for events in baseline] == [1] * 8
    assert {each.batch for each in EventLog(run.folder)} == {"eval-3", "baseline-3"}


def test_episodes_are_sorted_by_their_set_even_where_ids_are_the_same(job: Job, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"id": "1", "problem": "2+2=", "answer": "4"}\n')
    use = {"train": {"use": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]}}
    mine = Job.prepare(recipe_of(tasks=use))
    with Run.create(mine.recipe.model_copy(update={"run": str(tmp_path / "run")}), "r") as run:
        team, _ = mine.try_held_out(run, update=0, samples=2)
    by_set: dict[str, list[list[Event]]] = mine.by_set(team)
    assert {name: len(episodes) for name, episodes in by_set.items()} == {"a": 2, "b": 2}


def test_held_out_sets_may_have_names_and_settings_of_their_own() -> None:
    sets = {
        "easy": {"use": "arithmetic", "split": "test", "low": 1, "high": 9, "size": 3},
        "hard": {"use": "arithmetic", "split": "test", "size": 8, "limit": 2},
    }
    mine = Job.prepare(recipe_of(tasks={"train": {"use": "arithmetic"}, "eval": sets}))
    assert Counter(task.set for task in mine.held_out.tasks) == {"easy": 3, "hard": 2}


def test_a_limit_is_that_of_each_set(tmp_path: Path) -> None:
    for name in ("a", "b"):
        rows = [f'{{"id": "{name}{i}", "problem": "2+2=", "answer": "4"}}' for i in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    use = {"use": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], "limit": 2}
    mine = Job.prepare(recipe_of(tasks={"train": use}))
    assert [task.id for task in mine.tasks.tasks] == ["a0", "a1", "b0", "b1"]


def test_several_sets_under_one_name_are_refused() -> None:
    sets = {"both": {"use": ["a.jsonl", "b.jsonl"]}}
    with pytest.raises(InvalidRecipe, match=r"tasks\.eval\.both\.use: .* give each set its own"):
        Job.prepare(recipe_of(tasks={"train": {"use": "arithmetic"}, "eval": sets}))


def test_episodes_are_sorted_by_a_key_of_the_tasks_in_its_order(tmp_path: Path) -> None:
    rows = [{"id": "1", "problem": "p", "answer": "4", "level": 10}, {"id": "2", "problem": "p", "answer": "4"}]
    rows += [{"id": str(number), "problem": "p", "answer": "4", "level": 9} for number in (3, 4)]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, rows)))
    mine = Job.prepare(recipe_of(tasks={"train": {"use": str(tmp_path / "some.jsonl")}}, eval={"by": "level"}))
    with Run.create(mine.recipe.model_copy(update={"run": str(tmp_path / "run")}), "r") as run:
        team, _ = mine.try_held_out(run, update=0, samples=1)
    found = [(name, [each[-1].task for each in episodes]) for name, episodes in mine.by_key(team).items()]
    assert found == [("level 9", ["3", "4"]), ("level 10", ["1"])]
    assert Job.prepare(recipe_of()).by_key([]) == {}


def test_a_recipe_may_say_which_policy_an_agent_is_sampled_from() -> None:
    policies = {label: {"sample": {"backend": "scripted", "outputs": ["4"]}} for label in ("main", "second")}
    use = {"use": "solver_verifier", "policies": {"verifier": "second"}}
    agents = Job.prepare(recipe_of(workflow=use, policies=policies)).graph.workflow.agents
    assert {name: agent.policy for name, agent in agents.items()} == {"solver": "main", "verifier": "second"}


# What is wrong is found at once.


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"workflow": "single_agnet"}, InvalidInput, "single_agnet"),
        ({"workflow": {"use": "parallel_proposers", "params": {"k": 3}}}, InvalidInput, "k"),
        (
            {"workflow": {"use": "single_agent", "policies": {"solvr": "main"}}},
            InvalidRecipe,
            "workflow.policies: 'solvr' is not an agent of .* Did you mean 'solver'",
        ),
        ({"workflow": {"use": "single_agent", "policies": {"solver": "b"}}}, InvalidRecipe, "'solver' .* policy 'b'"),
        ({"eval": {"by": "operation"}}, InvalidRecipe, "eval.by: 'operation' is not .* Did you mean 'operations'"),
        ({"tasks": {"train": {"use": "arithmetics"}}}, UnknownName, "Did you mean 'arithmetic'"),
        ({"tasks": {"train": {"use": "arithmetic", "hihg": 3}}}, InvalidInput, "Did you mean 'high'"),
        ({"tasks": {"train": {"use": "arithmetic"}, "eval": {"use": "none.jsonl"}}}, InvalidInput, "none.jsonl"),
        ({"trainer": "srpoo"}, UnknownName, "Did you mean 'srpo'"),
        ({"policies": {"main": {"sample": {"backend": "scriptd"}}}}, UnknownName, "Did you mean 'scripted'"),
        (
            {"policies": {"man": {"model": "tiny_arithmetic"}}},
            InvalidRecipe,
            "policy 'main', which the recipe does not have",
        ),
        ({"sampling": {"agents": {"solvr": {}}}}, InvalidRecipe, "'solvr' is not an agent of the workflow"),
    ],
)
def test_a_wrong_recipe_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Job.prepare(recipe_of(**change))


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 5}, {"temperature": 0}], ids=str)
def test_a_trained_agent_is_sampled_from_the_whole_distribution(sampling: dict[str, float]) -> None:
    policies = {"main": {"model": "tiny_arithmetic", "train": {"lr": 1e-3}}}
    with pytest.raises(
        InvalidRecipe, match="log-probs of the learner match a positive temperature, top_p 1 and top_k 0"
    ):
        Job.prepare(recipe_of(policies=policies, sampling={"train": sampling}))


def test_a_frozen_agent_may_be_sampled_in_any_way() -> None:
    sampling = Job.prepare(recipe_of(sampling={"train": {"top_p": 0.9, "temperature": 0}})).recipe.sampling_of("solver")
    assert (sampling.top_p, sampling.temperature) == (0.9, 0)


def test_a_recipe_without_a_trained_policy_has_no_trainer(job: Job) -> None:
    with pytest.raises(InvalidRecipe, match="none has a `train` block"):
        job.trainer()


def test_a_policy_without_weights_can_not_be_trained() -> None:
    policies = {"main": {"sample": {"backend": "scripted", "outputs": ["4"]}, "train": {"lr": 1e-3}}}
    with pytest.raises(InvalidRecipe, match="backend 'scripted' has no weights in this process"):
        Job.prepare(recipe_of(policies=policies, learner={"preset": "srpo", "clip": 0.2})).trainer()
