"""Is the environment a Gymnasium environment, in every way in which Gymnasium drives one?"""

import asyncio
import os
import pickle
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import srpo_env
from srpo_env import Output, Task
from srpo_env.env import WorkflowEnv
from srpo_env.errors import InvalidAction, InvalidInput, UnknownName
from srpo_env.registration import IDS, register_envs
from srpo_env.rewards import Score

NAMES = [f"srpo_env/{name}-v0" for name in IDS]
APPROVE, REJECT = "<verdict>approve</verdict>", "<verdict>reject</verdict>"
TASKS = [Task(id=str(i), problem=f"{i}+{i}=", answers=(str(2 * i),)) for i in range(10)]


@pytest.fixture
def env() -> Iterator[WorkflowEnv]:
    """Solver and verifier on ten tasks."""
    made = srpo_env.make("solver_verifier", tasks=TASKS)
    yield made
    made.close()


# Gymnasium's own checks.


@pytest.mark.parametrize("name", NAMES)
def test_the_checker_of_gymnasium_has_no_complaint(name: str) -> None:
    check_env(gym.make(name).unwrapped)


@pytest.mark.parametrize("name", NAMES)
def test_every_observation_and_action_lies_in_its_space(name: str) -> None:
    env = gym.make(name)
    env.action_space.seed(1)
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        ended = False
        while not ended:
            assert env.observation_space.contains(observation)
            action = env.action_space.sample()
            assert env.action_space.contains(action)
            observation, _, terminated, truncated, _ = env.step(action)
            ended = terminated or truncated
        assert env.observation_space.contains(observation)


def test_registering_twice_changes_nothing() -> None:
    before = dict(gym.registry)
    register_envs()
    assert dict(gym.registry) == before


def test_the_spec_makes_the_environment_again() -> None:
    spec = gym.make("srpo_env/ParallelProposers-v0", proposers=5).spec
    assert spec is not None
    again = gym.make(type(spec).from_json(spec.to_json()))
    assert again.action_space == gym.make("srpo_env/ParallelProposers-v0", proposers=5).action_space


def test_an_environment_made_by_hand_has_no_spec(env: WorkflowEnv) -> None:
    assert env.spec is None


def test_params_set_the_largest_set() -> None:
    assert repr(srpo_env.make("parallel_proposers", proposers=5).action_space) == "Outputs(K <= 5)"


def test_stepping_before_reset_is_refused(env: WorkflowEnv) -> None:
    with pytest.raises(InvalidAction, match="call reset first"):
        env.step(("4",))


def test_close_may_be_called_twice(env: WorkflowEnv) -> None:
    env.close()


# Observations, rewards and infos.


def test_an_observation_shows_node_and_members(env: WorkflowEnv) -> None:
    observation, info = env.reset(options={"task": "3"})
    assert observation["node"] == "solve"
    (member,) = observation["members"]
    assert member["agent"] == "solver"
    assert member["messages"][-1]["content"].startswith("3+3=")
    assert info["task"] == "3"


def test_after_the_end_no_member_is_asked(env: WorkflowEnv) -> None:
    env.reset()
    env.step(("4",))
    observation, *_ = env.step((APPROVE,))
    assert observation == {"node": "verify", "members": ()}


def test_the_reward_comes_with_the_last_step(env: WorkflowEnv) -> None:
    env.reset(options={"task": "3"})
    assert env.step(("\\boxed{6}",))[1:4] == (0.0, False, False)
    assert env.step((APPROVE,))[1:4] == (1.0, True, False)


def test_a_truncation_comes_with_its_reason(env: WorkflowEnv) -> None:
    env.reset(options={"task": "3"})
    for text in ("5", REJECT, "5"):
        env.step((text,))
    _, _, terminated, truncated, info = env.step((REJECT,))
    assert (terminated, truncated, "truncated_by" in info) == (True, False, False)
    limited = srpo_env.make("solver_verifier", tasks=TASKS)
    limited.graph = limited.graph.__class__(**{**vars(limited.graph), "max_steps": 1})
    limited.reset()
    *_, truncated, info = limited.step(("5",))
    assert (truncated, info["truncated_by"]) == (True, "steps")


def test_an_unscored_episode_gives_zero_and_says_so() -> None:
    env = srpo_env.make("single_agent", tasks=[Task(id="1", problem="?", answers=())])
    env.reset()
    _, reward, _, _, info = env.step(("4",))
    assert (reward, info["scored"], info["event"].reward) == (0.0, False, None)


def test_a_scored_step_says_so(env: WorkflowEnv) -> None:
    env.reset()
    assert env.step(("4",))[4]["scored"] is True


def test_observations_and_infos_are_fresh_objects(env: WorkflowEnv) -> None:
    first, info = env.reset(options={"task": "3"})
    first["members"][0]["messages"][-1]["content"] = "spoilt"
    info["task"] = "spoilt"
    second, _, _, _, next_info = env.step(("6",))
    assert "spoilt" not in str(second)
    assert next_info["task"] == "3"
    assert "spoilt" not in str(env.episode.events[0])  # type: ignore[union-attr]


def test_an_output_may_carry_token_ids(env: WorkflowEnv) -> None:
    env.reset()
    output = Output(text="4", prompt_ids=(1,), output_ids=(2, 3), logprobs=(-1.0, -2.0))
    *_, info = env.step((output,))
    assert info["event"].members[0].output == output


# Actions.


def test_k_max_entries_are_taken_and_the_first_k_count() -> None:
    env = srpo_env.make("proposers_verifier", tasks=TASKS)
    env.reset()
    env.step(("1", "2", "3"))
    *_, info = env.step((r"\boxed{4}", "rest", 5))
    assert [member.output.text for member in info["event"].members] == [r"\boxed{4}"]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("abc", "action is a str"),
        (None, "action is a NoneType"),
        (4, "action is a int"),
        (Output(text="4"), "action is a Output"),
        ((), "got 0"),
        (("1", "2"), "got 2"),
        (("1", "2", "3", "4"), "got 4"),
        (("1", "2", 3), "is a int"),
    ],
)
def test_a_wrong_action_is_a_typed_error_that_changes_nothing(action: Any, message: str) -> None:
    env = srpo_env.make("proposers_verifier", tasks=TASKS)
    observation, _ = env.reset(seed=1)
    with pytest.raises(InvalidAction, match=message):
        env.step(action)
    assert env.episode is not None
    assert env.episode.events == []
    assert env._observation() == observation


def test_a_step_after_the_end_is_refused(env: WorkflowEnv) -> None:
    env.reset()
    env.step(("4",))
    env.step((APPROVE,))
    with pytest.raises(InvalidAction, match="has ended; call reset"):
        env.step(("4",))


# Seeds.


def tasks_of(env: WorkflowEnv, resets: int) -> list[str]:
    return [env.reset()[1]["task"] for _ in range(resets)]


def test_a_seed_starts_the_tasks_anew_and_without_one_they_go_on(env: WorkflowEnv) -> None:
    def walk() -> list[str]:
        return [env.reset(seed=7)[1]["task"], *tasks_of(env, 9)]

    first = walk()
    assert walk() == first
    assert len(set(first)) > 3


def test_two_environments_with_the_same_seed_go_the_same_way(env: WorkflowEnv) -> None:
    other = srpo_env.make("solver_verifier", tasks=TASKS)
    assert env.reset(seed=7) == other.reset(seed=7)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - that is what must not matter
    assert env.reset() == other.reset()


def test_the_global_generators_are_left_alone(env: WorkflowEnv) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]  # noqa: NPY002
    env.reset(seed=7)
    env.reset()
    env.action_space.sample()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index,union-attr]  # noqa: NPY002


def test_the_episode_id_counts_resets_since_the_seed(env: WorkflowEnv) -> None:
    ids = [env.reset(seed=7)[1]["episode"], env.reset()[1]["episode"], env.reset(seed=7)[1]["episode"]]
    assert [each.split(".")[1:] for each in ids] == [["7", "0"], ["7", "1"], ["7", "0"]]


def test_an_environment_that_was_never_seeded_still_tells_its_episodes_apart(env: WorkflowEnv) -> None:
    assert len({env.reset(options={"task": "3"})[1]["episode"] for _ in range(5)}) == 5


def test_the_same_outputs_give_equal_events(env: WorkflowEnv) -> None:
    def events() -> list[srpo_env.Event]:
        env.reset(seed=5)
        return [env.step((text,))[4]["event"] for text in ("4", REJECT, "5", APPROVE)]

    assert events() == events()


def test_a_task_can_be_given(env: WorkflowEnv) -> None:
    own = Task(id="own", problem="1+1=", answers=("2",))
    assert env.reset(options={"task": own})[1]["task"] == "own"


def test_a_task_that_is_not_in_the_set_is_named(env: WorkflowEnv) -> None:
    with pytest.raises(InvalidInput, match="task 'none' is not in task set"):
        env.reset(options={"task": "none"})


# Vector environments.


def episode(i: int) -> WorkflowEnv:
    return srpo_env.make("solver_verifier", tasks=TASKS[i : i + 1])


def vector(kind: type[Any], mode: AutoresetMode) -> Any:
    extra = {"shared_memory": False} if kind is AsyncVectorEnv else {}
    return kind([lambda i=i: episode(i) for i in range(2)], autoreset_mode=mode, **extra)


both = pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])


@both
def test_same_step_gives_the_ended_episodes_observation_and_event(kind: type[Any]) -> None:
    envs = vector(kind, AutoresetMode.SAME_STEP)
    envs.reset(seed=1)
    envs.step((("\\boxed{0}",), ("2",)))
    observations, rewards, terminated, _, infos = envs.step(((APPROVE,), (REJECT,)))
    envs.close()
    assert (terminated.tolist(), rewards.tolist()) == ([True, False], [1.0, 0.0])
    assert infos["final_obs"][0] == {"node": "verify", "members": ()}
    event = infos["final_info"]["event"][0]
    assert (event.step, event.episode) == (1, "0.1.0")
    assert infos["episode"][0] == "0.1.1"
    assert list(observations["node"]) == ["solve", "solve"]


@both
def test_next_step_resets_with_the_step_after_and_gives_no_event(kind: type[Any]) -> None:
    envs = vector(kind, AutoresetMode.NEXT_STEP)
    envs.reset(seed=1)
    envs.step((("\\boxed{0}",), ("2",)))
    observations, _, terminated, _, infos = envs.step(((APPROVE,), (REJECT,)))
    assert (observations["node"][0], observations["members"][0]) == ("verify", ())
    assert infos["event"][0].terminated
    observations, rewards, terminated, _, infos = envs.step((("ignored",), ("2",)))
    envs.close()
    assert (terminated.tolist(), rewards[0], observations["node"][0]) == ([False, False], 0.0, "solve")
    assert infos["_event"].tolist() == [False, True]
    assert infos["episode"][0] == "0.1.1"


@pytest.mark.parametrize("mode", list(AutoresetMode)[:2], ids=lambda mode: mode.name)
def test_make_vec_walks_on_sampled_actions(mode: AutoresetMode) -> None:
    envs = gym.make_vec(
        "srpo_env/ProposersVerifier-v0", 2, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}
    )
    envs.reset(seed=1)
    envs.action_space.seed(1)
    for _ in range(6):
        envs.step(envs.action_space.sample())
    envs.close()


# Rendering.


def test_ansi_is_the_episode_as_text() -> None:
    env = srpo_env.make("solver_verifier", tasks=TASKS, render_mode="ansi")
    assert env.render() is None
    env.reset(options={"task": "3"})
    assert env.render() == ""
    env.step(("six",))
    text = env.render()
    assert text is not None
    assert "step 0: solve (K = 1)" in text
    assert "solver[0] -> six" in text


def test_human_prints_each_step_as_it_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    env = srpo_env.make("single_agent", tasks=TASKS, render_mode="human")
    env.reset(options={"task": "3"})
    env.step((r"\boxed{6} \ud835[red]".encode("utf-8", "replace").decode(),))
    printed = capsys.readouterr().out
    assert "step 0: solve" in printed
    assert "[red]" in printed
    assert env.render() is None


def test_rendering_works_through_gym_make() -> None:
    env = gym.make("srpo_env/SingleAgent-v0", render_mode="ansi")
    env.reset(seed=1)
    env.step(("4",))
    assert "step 0" in str(env.render())


def test_an_unknown_render_mode_is_named() -> None:
    with pytest.raises(InvalidInput, match="render_mode 'rgb_array'"):
        srpo_env.make("single_agent", render_mode="rgb_array")


def test_an_unknown_workflow_is_named() -> None:
    with pytest.raises((InvalidInput, UnknownName), match="solver_verifer"):
        srpo_env.make("solver_verifer")


# Loops, threads and processes.


async def test_reset_and_step_work_inside_a_running_loop(env: WorkflowEnv) -> None:
    env.reset(seed=1)
    assert env.step(("4",))[4]["event"].node == "solve"


async def test_rollout_works_inside_a_running_loop(scripted: Callable[..., Any]) -> None:
    log = srpo_env.rollout("single_agent", tasks=TASKS, policies=scripted(lambda r: "4"), episodes=2, group_size=1)
    assert len(log) == 2


async def test_the_async_walk_is_the_same_walk(env: WorkflowEnv) -> None:
    seen = await env.areset(seed=1)
    step = await env.astep(("4",))
    assert env.reset(seed=1) == seen
    assert env.step(("4",)) == step


def test_it_works_after_a_fork(env: WorkflowEnv) -> None:
    env.reset(seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of forks beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if env.step(("4",))[4]["event"].node == "solve" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert env.step(("4",))[4]["event"].node == "solve"


def test_an_error_of_a_reward_reaches_the_caller() -> None:
    def wrong(task: Task, answer: str | None, events: Any) -> Score:
        raise ZeroDivisionError("reward")

    env = srpo_env.make("single_agent", tasks=srpo_env.load_tasks(TASKS, reward=wrong))
    env.reset()
    with pytest.raises(ZeroDivisionError, match="reward"):
        env.step(("4",))


def test_events_can_be_pickled(env: WorkflowEnv) -> None:
    env.reset(seed=1)
    event = env.step(("4",))[4]["event"]
    assert pickle.loads(pickle.dumps(event)) == event


def test_two_threads_can_each_drive_an_environment() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def walk(i: int) -> float:
        env = episode(i)
        env.reset(seed=i)
        env.step((f"\\boxed{{{2 * i}}}",))
        return env.step((APPROVE,))[1]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(walk, range(8))) == [1.0] * 8


def test_astep_of_many_environments_can_be_gathered() -> None:
    async def walk(i: int) -> float:
        env = episode(i)
        await env.areset(seed=i)
        await env.astep((f"\\boxed{{{2 * i}}}",))
        return (await env.astep((APPROVE,)))[1]

    async def main() -> list[float]:
        return await asyncio.gather(*map(walk, range(8)))

    assert asyncio.run(main()) == [1.0] * 8
