"""The command lines of vLLM servers that are printed for a recipe."""

from __future__ import annotations

import pytest

from srpo_env.agents.serving import vllm_commands
from srpo_env.agents.tiny import arithmetic
from srpo_env.errors import UnknownName

HERE = "http://127.0.0.1:8001/v1"


def test_each_url_gets_a_line_with_its_host_and_port_and_the_log_probs_of_the_sampled_distribution() -> None:
    assert vllm_commands([HERE, "http://gpu7:9000/v1"], "org/name", dtype="bfloat16") == [
        "vllm serve org/name --host 127.0.0.1 --port 8001 --dtype bfloat16 --logprobs-mode processed_logprobs",
        "vllm serve org/name --host gpu7 --port 9000 --dtype bfloat16 --logprobs-mode processed_logprobs",
    ]


def test_a_server_behind_https_is_not_ours_to_start() -> None:
    assert vllm_commands(["https://api.example.com/v1"], "org/name") == []


def test_a_url_without_a_port_means_that_of_http() -> None:
    (line,) = vllm_commands(["http://gpu7/v1"], "org/name")
    assert "--port 80 " in line


def test_a_registered_model_is_served_from_its_folder() -> None:
    (line,) = vllm_commands([HERE], "tiny_arithmetic")
    assert f"serve {arithmetic()} " in line


def test_a_model_that_is_not_there_is_told() -> None:
    with pytest.raises(UnknownName, match="no_such_model"):
        vllm_commands([HERE], "no_such_model")


def test_reloading_a_checkpoint_needs_the_developers_paths() -> None:
    (line,) = vllm_commands([HERE], "org/name", sync="checkpoint", lora_rank=8)
    assert line.startswith("VLLM_SERVER_DEV_MODE=1 vllm serve")
    assert "lora" not in line.lower()


def test_weights_from_gpu_to_gpu_need_a_transfer_engine() -> None:
    (line,) = vllm_commands([HERE], "org/name", sync="nccl")
    assert line.startswith("VLLM_SERVER_DEV_MODE=1 vllm serve")
    assert line.endswith("""--weight-transfer-config '{"backend": "nccl"}'""")


@pytest.mark.parametrize(("rank", "given"), [(1, 1), (2, 8), (16, 16), (20, 32), (512, 512), (None, 16)])
def test_adapters_need_room_for_their_rank_in_a_size_that_vllm_knows(rank: int | None, given: int) -> None:
    (line,) = vllm_commands([HERE], "org/name", sync="lora", lora_rank=rank)
    assert line.startswith("VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve")
    assert line.endswith(f"--enable-lora --max-lora-rank {given} --max-loras 1")


def test_what_the_policy_relies_on_is_handed_on_and_quoted() -> None:
    (line,) = vllm_commands([HERE], "org/name", served_model="my model", context_length=2048, key_variable="MY_KEY")
    assert "--served-model-name 'my model' --max-model-len 2048" in line
    assert line.endswith('--api-key "$MY_KEY"')
