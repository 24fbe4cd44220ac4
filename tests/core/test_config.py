"""Does a recipe say exactly what a run is made of, and is anything else refused by name?"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from srpo_env.config import Recipe, check_recipe, find_recipe, load_recipe, recipe_names
from srpo_env.errors import InvalidRecipe, UnknownName
from srpo_env.records import Sampling

SMALL = """
workflow: solver_verifier
tasks: {train: {use: arithmetic, high: 20}}
policies: {main: {model: tiny_arithmetic, train: {lr: 1.0e-3}}}
sampling: {train: {temperature: 0.8, max_tokens: 9}, agents: {solver: {max_tokens: 5}}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Recipe]:
    """Reads a recipe given as text, with overrides."""

    def recipe(*overrides: str, text: str = SMALL) -> Recipe:
        (tmp_path / "r.yaml").write_text(text, encoding="utf-8")
        return load_recipe(tmp_path / "r.yaml", overrides)

    return recipe


Read = Callable[..., Recipe]


def value_at(recipe: Recipe, key: str) -> Any:
    found: Any = recipe.model_dump()
    for part in key.split("."):
        found = found[part]
    return found


# Keys.


@pytest.mark.parametrize("name", recipe_names())
def test_the_recipe_that_ships_is_valid(name: str) -> None:
    assert load_recipe(name).policies


def test_a_workflow_may_be_given_by_its_name_alone(recipe: Read) -> None:
    assert (recipe().workflow.use, recipe().workflow.params) == ("solver_verifier", {})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("smapling: {}", r"unknown key 'smapling'; known here are .* Did you mean 'sampling'\?"),
        ("rollout: {groupsize: 3}", r"unknown key 'rollout.groupsize'; .* Did you mean 'group_size'\?"),
        ("rollout: {group_size: 0}", r"rollout.group_size: Input should be greater than or equal to 1, and it is 0"),
        ("seed: no", r"seed: Input should be a valid integer"),
        ("updates: many", r"updates: Input should be a valid integer.* 'many'"),
        ("seed: 1\nseed: 2", r"r.yaml:7:1: the key 'seed' is written twice"),
        ("rollout: [", r"r.yaml:.*: not YAML"),
        ("seed: 012", r"012 is a number of another base in some versions of YAML"),
        ("eval: {samples: }", r"eval.samples: Input should be a valid integer, and it is None"),
    ],
)
def test_a_wrong_key_or_value_is_named(recipe: Read, text: str, problem: str) -> None:
    with pytest.raises(InvalidRecipe, match=problem):
        recipe(text=SMALL + text + "\n")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("workflow: solver", "workflow: {use: x, parms: {}}\nx-unused: ", r"unknown key 'workflow.parms'.*'params'\?"),
        ("model: tiny", "modl: tiny", r"unknown key 'policies.main.modl'; .* Did you mean 'model'\?"),
        ("lr: 1.0e-3", "lr: 0", r"policies.main.train.lr: Input should be greater than 0, and it is 0"),
        ("lr: 1.0e-3", "lrr: 1", r"unknown key 'policies.main.train.lrr'; .* Did you mean 'lr'\?"),
        ("{max_tokens: 5}", "{max_token: 5}", r"sampling.agents.solver: unknown key 'max_token'; .*'max_tokens'\?"),
        ("{max_tokens: 5}", "{top_p: 2}", r"sampling.agents.solver: top_p: Input should be less than or equal to 1"),
        ("temperature: 0.8", "temperature: -1", r"sampling.train.temperature: Input should be greater"),
        ("use: arithmetic", "use: 5", r"tasks.train.use: Input should be a valid string, and it is 5"),
        ("policies: {main:", "policies: {}\nmain: {x:", r"policies: Dictionary should have at least 1 item"),
        ("tasks: {train:", "tasks: {trian:", r"key 'tasks.train' is missing.*\n.*'tasks.trian'.*'train'\?"),
    ],
)
def test_a_wrong_nested_key_or_value_is_named(recipe: Read, old: str, new: str, problem: str) -> None:
    with pytest.raises(InvalidRecipe, match=problem):
        recipe(text=SMALL.replace(old, new))


def test_all_problems_come_at_once_each_with_the_file(recipe: Read) -> None:
    with pytest.raises(InvalidRecipe) as error:
        recipe(text=SMALL + "seed: x\nupdates: -1\nnothing: 1\n")
    assert [line.rsplit("/", 1)[1].split(":")[0] for line in str(error.value).splitlines()] == ["r.yaml"] * 3


@pytest.mark.parametrize("text", ["", "- 1\n", "just text\n"], ids=["empty", "a list", "a text"])
def test_what_is_no_mapping_is_no_recipe(recipe: Read, text: str) -> None:
    with pytest.raises(InvalidRecipe, match="mapping"):
        recipe(text=text)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRecipe, match=r"r.yaml can't be read"):
        load_recipe(tmp_path / "r.yaml")


# Finding one.


def test_an_unknown_recipe_is_named_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"recipe 'arithmetic_tinny' is not known.* Did you mean 'arithmetic_tiny'\?"):
        find_recipe("arithmetic_tinny")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"none.yaml' is not known"):
        find_recipe(tmp_path / "none.yaml")


def test_a_run_folder_stands_for_its_own_recipe(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(SMALL)
    assert load_recipe(tmp_path).workflow.use == "solver_verifier"


# Overrides.


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("seed=7", "seed", 7),
        ("rollout.group_size=3", "rollout.group_size", 3),
        ("policies.main.train.lr=1e-2", "policies.main.train.lr", 0.01),
        ("policies.main.train.betas=[0.8, 0.9]", "policies.main.train.betas", (0.8, 0.9)),
        ("policies.other.model=x", "policies.other.model", "x"),
        ("workflow.params.rounds=4", "workflow.params.rounds", 4),
        ("learner.clip=0.2", "learner.clip", 0.2),
        ("learner.a.b=text with = and spaces", "learner.a.b", "text with = and spaces"),
        ("tasks.eval={use: arithmetic, split: test}", "tasks.eval.split", "test"),
        ("policies.main.train=", "policies.main.train", None),
        ("run=no", "run", "no"),
    ],
)
def test_an_override_sets(recipe: Read, override: str, key: str, value: Any) -> None:
    assert value_at(recipe(override), key) == value


def test_an_override_leaves_the_rest_alone(recipe: Read) -> None:
    before, after = recipe().model_dump(), recipe("policies.main.train.lr=0.5").model_dump()
    after["policies"]["main"]["train"]["lr"] = before["policies"]["main"]["train"]["lr"]
    assert after == before


def test_the_last_override_of_a_key_counts(recipe: Read) -> None:
    assert recipe("seed=1", "seed=2").seed == 2


def test_overrides_may_be_a_mapping(recipe: Read, tmp_path: Path) -> None:
    recipe()
    assert load_recipe(tmp_path / "r.yaml", {"rollout.group_size": 3}).rollout.group_size == 3


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("rollout.groupsize=3", r"unknown key 'rollout.groupsize'; .* Did you mean 'group_size'\?"),
        ("sed=3", r"unknown key 'sed'; .* Did you mean 'seed'\?"),
        ("updates.x=3", r"updates: Input should be a valid integer, and it is \{'x': 3\}"),
        ("description.x.y=3", r"description: Input should be a valid string"),
        ("workflow.use.x=3", r"override workflow.use.x=3: 'workflow.use' is 'solver_verifier' and has no keys"),
        ("seed", r"override 'seed': it has the form key=value"),
        ("=3", r"override '=3': it has the form key=value"),
        ("seed=[1", r"override 'seed=\[1':.*not YAML"),
        ("seed=1: 2: 3", r"override 'seed=1: 2: 3':.*not YAML"),
        ("seed=-1", r"seed: Input should be greater than or equal to 0, and it is -1"),
    ],
)
def test_a_wrong_override_is_named(recipe: Read, override: str, problem: str) -> None:
    with pytest.raises(InvalidRecipe, match=problem):
        recipe(override)


def test_another_preset_drops_what_the_file_sets_beside_its_own(recipe: Read) -> None:
    text = SMALL + "learner: {preset: srpo, clip: 0.2, mini_batches: 3}\n"
    assert recipe("learner.preset=grpo", text=text).learner == {"preset": "grpo", "mini_batches": 3}


def test_an_override_beside_another_preset_is_kept(recipe: Read) -> None:
    text = SMALL + "learner: {preset: srpo, clip: 0.2}\n"
    found = recipe("learner.clip=0.3", "learner.preset=grpo", text=text).learner
    assert found == {"preset": "grpo", "clip": 0.3}


# Sampling.


def test_an_agents_settings_lie_on_top_of_those_of_training(recipe: Read) -> None:
    assert recipe().sampling_of("solver") == Sampling(temperature=0.8, max_tokens=5)
    assert recipe().sampling_of("verifier") == Sampling(temperature=0.8, max_tokens=9)


def test_evaluation_samples_as_training_does_unless_told_otherwise(recipe: Read) -> None:
    assert recipe().sampling_of("solver", evaluating=True) == Sampling(temperature=0.8, max_tokens=5)


def test_an_agents_settings_lie_on_top_of_those_of_evaluation(recipe: Read) -> None:
    found = recipe("sampling.eval={temperature: 0.2, top_p: 0.9}")
    assert found.sampling_of("solver", evaluating=True) == Sampling(temperature=0.2, top_p=0.9, max_tokens=5)
    assert found.sampling_of("solver") == Sampling(temperature=0.8, max_tokens=5)


# Written and read again.


def test_a_resolved_recipe_loads_back_equal(recipe: Read, tmp_path: Path) -> None:
    first = recipe("tasks.eval.use=[a, b.jsonl]", "learner.clip=[3.0e-4, 4.0e-4]", "run=runs/x", "threads=1")
    (tmp_path / "config.yaml").write_text(first.to_yaml(), encoding="utf-8")
    assert load_recipe(tmp_path) == first


def test_a_resolved_recipe_holds_every_default(recipe: Read) -> None:
    written = yaml.safe_load(recipe().to_yaml())
    assert written["rollout"] == {"tasks_per_batch": 16, "group_size": 8, "max_in_flight": 512, "deterministic": True}


TEXTS = st.text(max_size=20) | st.sampled_from(["no", "~", "null", "1e3", "012", "2024-01-01", "1:30", "- x", "a: b"])


@settings(max_examples=settings.default.max_examples // 8)
@given(text=TEXTS, number=st.floats(allow_nan=False, allow_infinity=False), key=TEXTS.filter(bool))
def test_any_text_and_number_in_a_recipe_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, text: str, number: float, key: str
) -> None:
    data = yaml.safe_load(SMALL) | {"description": text, "learner": {"x": number, "y": [text], "z": {key: text}}}
    try:
        first = check_recipe(data, "r")
    except InvalidRecipe:
        return
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.yaml").write_text(first.to_yaml(), encoding="utf-8")
    assert load_recipe(folder) == first


def test_an_override_of_an_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(InvalidRecipe, match=r"'mian' is not a policy .* Did you mean 'main'"):
        load_recipe("arithmetic_tiny", ["policies.mian.train.lr=1.0e-3"])
