"""Does a learner go on from its checkpoint as if it had never stopped?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from srpo_env.config import PolicyTraining
from srpo_env.errors import InvalidInput
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.learner import SRPOLearner
from tests.srpo.learning import (
    flat,
    learner_of,
    unmoved,
)


def test_a_resumed_learner_goes_on_bit_for_bit(make: Any, tmp_path: Path) -> None:
    config = SRPOConfig(clip=0.2, length_norm="sum")
    how = PolicyTraining(lr=1e-3, schedule="cosine", weight_decay=0.1)

    def fresh(seed: int) -> tuple[dict[str, Any], SRPOLearner]:
        policies = {label: make.policy(make.qwen3(seed + i)) for i, label in enumerate("ab")}
        return policies, learner_of(policies, config, training=how, total_updates=5, seed=3)

    batches = [make.batch(seed, policies=("a", "b")) for seed in (1, 2, 3, 4)]
    batches[1] = flat(make, 1.0, policy="b")  # an update without a step: versions and updates part
    whole, learner = fresh(0)
    for batch in batches[:2]:
        learner.update(batch)
    learner.save(tmp_path)
    expected = [learner.update(batch)["loss"] for batch in batches[2:]]
    resumed, other = fresh(40)
    other.load(tmp_path)
    assert [policy.version for policy in resumed.values()] == [1, 1]
    assert [other.update(batch)["loss"] for batch in batches[2:]] == expected
    for label, policy in whole.items():
        assert unmoved(resumed[label], policy.parameters())
        assert resumed[label].version == policy.version == 3
    assert other.updates == learner.updates == 4


def test_plain_transformers_loads_a_checkpoint_and_saving_says_nothing(
    make: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = make.policy(make.qwen3())
    learner = learner_of(policy, SRPOConfig(clip=0.2))
    learner.update(make.batch(3))
    learner.save(tmp_path)
    assert capfd.readouterr() == ("", "")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "main")
    assert all(torch.equal(each, policy.parameters()[name]) for name, each in model.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "main").vocab_size == 30


def test_a_folder_that_is_no_checkpoint_is_refused_and_nothing_changes(make: Any, tmp_path: Path) -> None:
    policy = make.policy(make.gpt2())
    learner, before = learner_of(policy, SRPOConfig(clip=0.2)), policy.parameters()
    with pytest.raises(InvalidInput, match=r"checkpoint .*: trainer.pt can't be read \(FileNotFoundError\)"):
        learner.load(tmp_path)
    (tmp_path / "trainer.pt").write_text("no")
    with pytest.raises(InvalidInput, match=r"trainer\.pt can't be read"):
        learner.load(tmp_path)
    learner_of({"other": make.policy(make.gpt2(1))}, SRPOConfig(clip=0.2)).save(tmp_path)
    with pytest.raises(InvalidInput, match="it has no policy 'main', which is trained; it has other"):
        learner.load(tmp_path)
    assert unmoved(policy, before)
