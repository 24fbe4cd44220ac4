"""verl's own loss and advantages on given tensors; runs in build/peers/verl.

verl_peer.py INPUT.pt OUTPUT.pt
"""

import sys
from typing import Any

import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

# Its dual clip, at 3 by default, is a rule beyond the presets': far out of reach here.
NO_DUAL_CLIP = 1e9
SETTINGS: dict[str, tuple[str, str, tuple[float, float]]] = {
    "grpo": ("vanilla", "seq-mean-token-mean", (0.2, 0.2)),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm", (0.2, 0.2)),
    "dapo": ("vanilla", "token-mean", (0.2, 0.28)),
    "gspo": ("gspo", "seq-mean-token-mean", (3e-4, 4e-4)),
}


def loss_of(given: dict[str, Any], name: str, mode: str, clip: tuple[float, float]) -> dict[str, Any]:
    """Loss and its gradient by the log-probs, by the registered policy loss."""
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=given["group_size"],
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=clip[0],
        clip_ratio_high=clip[1],
        clip_ratio_c=NO_DUAL_CLIP,
    )
    config.global_batch_info["loss_scale_factor"] = given["constant_length"]
    new, mask = given["new"].clone().requires_grad_(), given["mask"].to(given["new"].dtype)
    advantage = given["advantage"].unsqueeze(1) * mask
    loss, _ = core_algos.get_policy_loss_fn(name)(given["old"], new, advantage, mask, mode, config)
    (gradient,) = torch.autograd.grad(loss, new)
    return {"loss": loss.detach(), "gradient": gradient}


def main() -> None:
    """Reads, computes, writes."""
    source, target = sys.argv[1:]
    given = torch.load(source)
    rewards, mask = given["rewards"].unsqueeze(1), torch.ones(len(given["rewards"]), 1, dtype=torch.float64)
    group = given["group"].numpy()

    def grpo(**settings: Any) -> torch.Tensor:
        return core_algos.compute_grpo_outcome_advantage(rewards.clone(), mask, group, **settings)[0].squeeze(1)

    found: dict[str, Any] = {
        "advantage group": grpo(epsilon=1e-4),
        "advantage group_no_std": grpo(norm_adv_by_std_in_grpo=False),
        "advantage loo": core_algos.compute_rloo_outcome_advantage(rewards.clone(), mask, group)[0].squeeze(1),
    }
    for name, (loss, mode, clip) in SETTINGS.items():
        found[name] = loss_of(given, loss, mode, clip)
    torch.save(found, target)


if __name__ == "__main__":
    main()
