"""Do settings say what SRPO.md says, and refuse the rest in one clear line?"""

from __future__ import annotations

import doctest
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from srpo_env.config import load_recipe, recipe_of
from srpo_env.errors import InvalidRecipe
from srpo_env.trainers.srpo import config, schedule
from srpo_env.trainers.srpo.config import PRESET_KEYS, PRESETS, SRPOConfig

INF = math.inf
GIVEN: dict[str, dict[str, Any]] = {"srpo": {"clip": 0.2}, "dr_grpo": {"constant_length": 9}}
# SRPO.md, section 2: level, reduction, estimator, ddof, eps, clip.
TABLE = [
    ("srpo", "set", "event", "group", 0, 0.0, (0.2, 0.2)),
    ("grpo", "token", "member", "group", 1, 1e-4, (0.2, 0.2)),
    ("dr_grpo", "token", "constant", "group_no_std", 0, 0.0, (0.2, 0.2)),
    ("dapo", "token", "token", "group", 1, 1e-4, (0.2, 0.28)),
    ("gspo", "member", "member", "group", 1, 1e-4, (3e-4, 4e-4)),
    ("dr_mas", "token", "token", "agent", 1, 1e-6, (0.2, 0.2)),
    ("at_grpo", "token", "member", "agent_turn", 1, 1e-6, (0.2, 0.2)),
    ("rloo", "member", "member", "loo", 0, 0.0, (1.0, INF)),
]


def preset(name: str, **changes: Any) -> SRPOConfig:
    return SRPOConfig.checked({"preset": name} | GIVEN.get(name, {}) | changes)


@pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
def test_a_preset_sets_what_the_table_says(row: tuple[Any, ...]) -> None:
    found = preset(row[0])
    assert (found.ratio_level, found.reduction, found.estimator, found.ddof, found.eps, found.clip) == row[1:]


def test_the_table_is_whole() -> None:
    assert set(PRESETS) == {row[0] for row in TABLE}


def test_what_else_the_table_says() -> None:
    assert (preset("srpo").set_norm, preset("srpo").length_norm) == ("sqrt", "mean")
    assert preset("gspo").length_norm == "mean"
    assert preset("rloo").length_norm == "sum"
    assert (preset("dr_mas").lone, preset("dr_mas").per_policy) == ("raw", True)
    others = [preset(row[0]) for row in TABLE if row[0] != "dr_mas"]
    assert all((each.lone, each.per_policy) == ("zero", False) for each in others)
    assert all(preset(row[0]).invalid_penalty == 0 for row in TABLE)


def test_every_key_that_a_preset_sets_is_dropped_by_an_override_of_it() -> None:
    assert {key for values in PRESETS.values() for key in values} <= set(PRESET_KEYS) <= set(SRPOConfig.model_fields)


def test_a_key_beside_the_preset_wins() -> None:
    found = preset("gspo", clip=[0.1, 0.3], ddof=0)
    assert (found.clip, found.ddof, found.ratio_level) == ((0.1, 0.3), 0, "member")


def test_one_number_is_both_distances() -> None:
    assert preset("srpo", clip=0.3).clip == (0.3, 0.3)
    assert preset("srpo", clip=1).clip == (1.0, 1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {},
            "learner: clip is missing; preset srpo has none, since .* length_norm. Give \\[low, high]",
        ),
        ({"preset": "gpso"}, "learner: preset: .* it is 'gpso'. Did you mean 'gspo'?"),
        ({"preset": ["srpo"]}, "learner: preset: .* it is \\['srpo'\\]"),
        ({"clip": 0.2, "set_norms": "sqrt"}, "learner: unknown key 'set_norms'; known are .* Did you mean 'set_norm'?"),
        ({"clip": -0.1}, "learner: clip is \\[-0.1, -0.1\\]; both distances from 1 are at least 0"),
        ({"clip": math.nan}, "learner: clip is \\[nan, nan\\]; both"),
        ({"clip": [0.1]}, "learner: clip"),
        ({"clip": True}, "learner: clip: .* it is True"),
        ({"clip": "wide"}, "learner: clip: .* it is 'wide'"),
        ({"preset": "dr_grpo"}, "learner: reduction 'constant' needs constant_length, in tokens"),
        ({"clip": 0.2, "estimator": "gruop"}, "learner: estimator 'gruop' is none of .* Did you mean 'group'?"),
        ({"clip": 0.2, "objective": "mine"}, "learner: objective 'mine' is no `module:attr`"),
        (
            {"clip": 0.2, "per_policy": True},
            "per_policy with ratio_level 'set', whose units may hold members of several",
        ),
        ({"clip": 0.2, "invalid_penalty": -1}, "learner: invalid_penalty: .* it is -1"),
        ({"clip": 0.2, "estimator_settings": {"a": 1}}, "estimator_settings are for an own .* it is 'group'"),
        ({"clip": 0.2, "objective_settings": {"a": 1}}, "objective_settings are for an own objective"),
        ({"clip": 0.2, "ratio_level": "sets"}, "learner: ratio_level: .* it is 'sets'"),
        ({"clip": 0.2, "mini_batches": 0}, "learner: mini_batches: .* it is 0"),
        ({"clip": 0.2, "gamma": 1.5}, "learner: gamma: .* it is 1.5"),
        ({"clip": 0.2, "eps": math.inf}, "learner: eps: .* it is inf"),
        ({"preset": "dr_grpo", "constant_length": math.inf}, "learner: constant_length: .* it is inf"),
    ],
)
def test_what_is_wrong_is_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRecipe, match=message) as caught:
        SRPOConfig.checked(values)
    assert "\n" not in str(caught.value)


def test_all_that_is_wrong_is_named() -> None:
    with pytest.raises(InvalidRecipe) as caught:
        SRPOConfig.checked({"clip": 0.2, "epochs": 0, "eps": -1})
    assert [line.split(":")[1] for line in str(caught.value).splitlines()] == [" eps", " epochs"]


def test_no_upper_bound_survives_yaml() -> None:
    written = yaml.safe_dump(preset("rloo").model_dump(mode="json"))
    assert SRPOConfig.checked(yaml.safe_load(written)) == preset("rloo")
    recipe = recipe_of(RECIPE | {"learner": {"clip": [0.2, INF]}}, [], "here")
    again = yaml.safe_load(recipe.to_yaml())["learner"]
    assert SRPOConfig.checked(again).clip == (0.2, INF)


def test_the_examples_are_right() -> None:
    for module in (config, schedule):
        found = doctest.testmod(module)
        assert (found.failed, found.attempted > 0) == (0, True)


# Overrides of a recipe.

RECIPE: dict[str, Any] = {
    "workflow": "tiny/single_agent",
    "tasks": {"train": {"use": "arithmetic"}},
    "policies": {"main": {"model": "tiny_arithmetic"}},
}


def overridden(learner: Any, *overrides: str, **others: Any) -> dict[str, Any]:
    return recipe_of({**RECIPE, "learner": learner, **others}, overrides, "here").learner


def test_another_preset_drops_what_the_file_set_beside_its_own() -> None:
    file = {"clip": 0.2, "length_norm": "sum", "set_norm": "mean", "eps": 0.1, "mini_batches": 4, "gamma": 0.9}
    assert overridden(file, "learner.preset=gspo") == {"preset": "gspo", "mini_batches": 4, "gamma": 0.9}
    assert file.keys() == {"mini_batches", "gamma", "preset"}


def test_overrides_beside_another_preset_win() -> None:
    file = {"preset": "srpo", "clip": 0.2, "length_norm": "sum"}
    expected = {"preset": "gspo", "clip": 0.5}
    assert overridden(dict(file), "learner.preset=gspo", "learner.clip=0.5") == expected
    assert overridden(dict(file), "learner.clip=0.5", "learner.preset=gspo") == expected


def test_other_overrides_drop_nothing() -> None:
    assert overridden({"clip": 0.2, "eps": 0.1}, "learner.clip=0.3") == {"clip": 0.3, "eps": 0.1}


def test_a_recipe_without_settings_takes_a_preset() -> None:
    assert overridden({}, "learner.preset=grpo") == {"preset": "grpo"}


def test_the_preset_of_a_trainer_without_presets_is_a_key_like_others(tmp_path: Path) -> None:
    trainer = tmp_path / "mine.py"
    trainer.write_text("class Mine: pass\n")
    found = overridden({"clip": 0.2}, f"trainer={trainer}:Mine", "learner.preset=x")
    assert found == {"clip": 0.2, "preset": "x"}


def test_srpo_by_override_of_a_peers_recipe_must_be_given_a_clip(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(RECIPE | {"learner": {"preset": "dapo", "clip": 0.3}}))
    recipe = load_recipe(file, ["learner.preset=srpo"])
    with pytest.raises(InvalidRecipe, match="clip is missing"):
        SRPOConfig.checked(recipe.learner)


def test_the_page_on_the_learner_names_every_setting_and_preset() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "learner.md").read_text(encoding="utf-8")
    assert [name for name in SRPOConfig.model_fields if name not in page] == []
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    assert all(row[1] in rows[row[0]] and row[2] in rows[row[0]] and row[3] in rows[row[0]] for row in TABLE)
