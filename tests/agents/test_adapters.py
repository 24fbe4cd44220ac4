"""Does each policy have an adapter of its own, on weights that nobody changes?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from srpo_env.adapters import adapter_weights
from srpo_env.agents.local import LocalPolicy
from srpo_env.config import Lora, check_recipe
from srpo_env.errors import InvalidRecipe, MissingExtra, PolicyError
from srpo_env.jobs import Job

LORA = Lora(rank=4, alpha=8)
IDS = torch.tensor([[5, 6, 7, 8, 9]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def trainable(policy: LocalPolicy) -> dict[str, torch.nn.Parameter]:
    return {name: each for name, each in policy.model.named_parameters() if each.requires_grad}


def disturb(policy: LocalPolicy) -> None:
    """Gives an adapter weights that say something."""
    draw = torch.Generator().manual_seed(1)
    for each in trainable(policy).values():
        each.data.normal_(0, 0.3, generator=draw)


@pytest.fixture
def trained(folder: Path) -> LocalPolicy:
    policy = LocalPolicy(folder, lora=LORA)
    disturb(policy)
    return policy


def test_only_the_adapter_can_be_trained_and_at_first_it_says_nothing(folder: Path) -> None:
    policy = LocalPolicy(folder, lora=LORA)
    assert isinstance(policy.model, peft.PeftModel)
    assert trainable(policy)
    assert all("lora_" in name for name in trainable(policy))
    assert torch.equal(logits(policy.model), logits(AutoModelForCausalLM.from_pretrained(folder)))


def test_policies_of_one_model_share_its_weights_and_nothing_else(folder: Path) -> None:
    a, b, frozen = LocalPolicy(folder, lora=LORA), LocalPolicy(folder, lora=LORA), LocalPolicy(folder, frozen=True)
    places = [{each.data_ptr() for each in policy.model.parameters()} for policy in (a, b, frozen)]
    assert places[0] & places[1] == places[2]
    before = logits(b.model), logits(frozen.model)
    disturb(a)
    assert torch.equal(logits(b.model), before[0])
    assert torch.equal(logits(frozen.model), before[1])
    assert not torch.allclose(logits(a.model), before[1], atol=1e-3)


def test_a_policy_that_trains_all_weights_shares_none(folder: Path) -> None:
    adapted, whole = LocalPolicy(folder, lora=LORA), LocalPolicy(folder)
    places = [{each.data_ptr() for each in policy.model.parameters()} for policy in (adapted, whole)]
    assert places[0].isdisjoint(places[1])


def test_the_seed_draws_the_adapter(folder: Path) -> None:
    def first(seed: int) -> torch.Tensor:
        return next(iter(trainable(LocalPolicy(folder, lora=LORA, seed=seed)).values()))

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(first(3), first(3))
    assert torch.equal(torch.rand(1), expected)
    assert not torch.equal(first(3), first(4))


def test_a_policy_samples_through_its_adapter(trained: LocalPolicy, ask: Any, forced: Any) -> None:
    outputs = ask.outputs(trained, [ask.request("what is the sum", seed, max_tokens=8) for seed in range(4)])
    for output in outputs:
        expected = forced(trained.model, output.prompt_ids, output.output_ids)
        assert output.logprobs == pytest.approx(expected, abs=1e-5)
    (below,) = {each.prompt_ids for each in outputs}
    with trained.model.disable_adapter():  # type: ignore[operator]
        assert outputs[0].logprobs != pytest.approx(forced(trained.model, below, outputs[0].output_ids), abs=1e-3)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_plain_peft_loads_what_is_saved(trained: LocalPolicy, folder: Path, tmp_path: Path) -> None:
    trained.model.save_pretrained(tmp_path, save_embedding_layers=False)
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path)
    assert torch.equal(logits(plain), logits(trained.model))


def test_an_adapter_comes_back_from_its_folder(trained: LocalPolicy, folder: Path, tmp_path: Path) -> None:
    trained.model.save_pretrained(tmp_path, save_embedding_layers=False)
    again = LocalPolicy(folder, lora=LORA)
    again.load_weights(tmp_path, 7)
    assert again.version == 7
    assert torch.equal(logits(again.model), logits(trained.model))


def test_an_adapter_comes_as_weights(trained: LocalPolicy, folder: Path) -> None:
    again = LocalPolicy(folder, lora=LORA)
    again.load_weights(adapter_weights(trained.model), 1)
    assert torch.equal(logits(again.model), logits(trained.model))


def test_the_folder_of_an_adapter_is_a_model_and_training_may_start_there(
    trained: LocalPolicy, folder: Path, tmp_path: Path
) -> None:
    trained.model.save_pretrained(tmp_path, save_embedding_layers=False)
    frozen, further = LocalPolicy(tmp_path), LocalPolicy(tmp_path, lora=LORA)
    assert torch.equal(logits(frozen.model), logits(trained.model))
    assert torch.equal(logits(further.model), logits(trained.model))
    assert trainable(frozen) == {}
    assert trainable(further).keys() == trainable(trained).keys()


def test_weights_of_another_adapter_are_refused_and_change_nothing(trained: LocalPolicy, folder: Path) -> None:
    other = LocalPolicy(folder, lora=Lora(rank=2))
    before = logits(trained.model)
    with pytest.raises(PolicyError, match=r"with this adapter: 'base_model.* has another shape"):
        trained.load_weights(adapter_weights(other.model), 1)
    with pytest.raises(PolicyError, match="is not in the model"):
        trained.load_weights(folder, 1)
    assert torch.equal(logits(trained.model), before)


@pytest.mark.parametrize(
    ("targets", "message"),
    [(("q_prj",), r"lora.targets \['q_prj'\]: .*q_prj"), (("q_proj", "lm_head"), "the output layer is among them")],
)
def test_targets_that_cannot_be_trained_are_refused(folder: Path, targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidRecipe, match=message):
        LocalPolicy(folder, lora=Lora(targets=targets)).model  # noqa: B018


def test_without_peft_one_line_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra, match=r"pip install 'srpo-env\[lora\]'"):
        LocalPolicy(folder, lora=LORA).model  # noqa: B018


def test_a_recipe_says_who_has_an_adapter_and_who_shares(folder: Path) -> None:
    recipe = check_recipe(
        {
            "workflow": "single_agent",
            "tasks": {"train": {"use": "arithmetic"}},
            "policies": {
                "main": {"model": str(folder), "train": {"lora": {"rank": 2, "targets": ["q_proj"]}}},
                "judge": {"model": str(folder)},
            },
            "learner": {"clip": 0.2},
            "seed": 3,
        },
        "recipe",
    )
    policies: dict[str, Any] = Job.prepare(recipe).policies
    assert len(trainable(policies["main"])) == 4  # two matrices in each of two layers
    places = [{each.data_ptr() for each in policy.model.parameters()} for policy in policies.values()]
    assert places[1] < places[0]
