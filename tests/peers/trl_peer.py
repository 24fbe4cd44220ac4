"""TRL's own loss and advantages on given tensors; runs in build/peers/trl.

trl_peer.py INPUT.pt MODEL_FOLDER OUTPUT.pt
"""

import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "epsilon": (0.2, 0.2)},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon": (0.2, 0.2)},
    "dapo": {"loss_type": "dapo", "epsilon": (0.2, 0.28)},
    "gspo": {"loss_type": "grpo", "epsilon": (3e-4, 4e-4), "importance_sampling_level": "sequence"},
}


def rewarded(completions: list[Any], wanted: list[float], **_: Any) -> list[float]:
    """The rewards that the dataset asks for, whatever was generated."""
    return wanted


def trainer_of(given: dict[str, Any], model: str, folder: str, scale_rewards: str) -> GRPOTrainer:
    """A trainer on a tiny model, whose groups are those of the given rewards."""
    rows = [{"prompt": "1+1=", "wanted": reward} for reward in given["rewards"].tolist()]
    args = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=len(rows),
        num_generations=given["group_size"],
        max_completion_length=given["constant_length"],
        scale_rewards=scale_rewards,
    )
    return GRPOTrainer(model=model, reward_funcs=rewarded, args=args, train_dataset=Dataset.from_list(rows))


def loss_of(trainer: GRPOTrainer, given: dict[str, Any], settings: dict[str, Any], beta: float) -> dict[str, Any]:
    """Loss and its gradient by the log-probs, by `GRPOTrainer._compute_loss`."""
    new = given["new"].clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (new, torch.zeros_like(new), None)
    trainer.loss_type = settings["loss_type"]
    trainer.importance_sampling_level = settings.get("importance_sampling_level", "token")
    trainer.epsilon_low, trainer.epsilon_high = settings["epsilon"]
    trainer.beta = beta
    trainer.args.use_bias_correction_kl = False  # weighs k3 by the ratio: a rule beyond the presets
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    mask = given["mask"].long()
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": given["advantage"],
        "old_per_token_logps": given["old"],
        "ref_per_token_logps": given["ref"],
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(trainer.model.train(), inputs)
    (gradient,) = torch.autograd.grad(loss, new)
    return {"loss": loss.detach(), "gradient": gradient}


def main() -> None:
    """Reads, computes, writes."""
    source, model, target = sys.argv[1:]
    given = torch.load(source)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, scale in (("advantage group", "group"), ("advantage group_no_std", "none")):
            trainer = trainer_of(given, model, folder, scale)
            rows = [dict(row) for row in trainer.train_dataset]
            found[name] = trainer._generate_and_score_completions(rows)["advantages"]
        for name, settings in SETTINGS.items():
            found[name] = loss_of(trainer, given, settings, beta=0.0)
            found[f"{name} kl"] = loss_of(trainer, given, settings, beta=0.1)
    torch.save(found, target)


if __name__ == "__main__":
    main()
