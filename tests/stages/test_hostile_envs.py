"""Whatever an environment does, a rollout gives sound episodes or an error that says where and how to see it again."""

import json
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import EnvError, MetaEnv
from metaloom.pipeline.envs.point import Point2DGoal, PointBatch
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.nn.networks import build_network
from metaloom.pipeline.nn.spec import NetworkSpec
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.seeding import seed_for
from metaloom.pipeline.tasks.samplers import draw_tasks
from metaloom.pipeline.types import EpisodeBatch, TaskBatch, TaskParams
from metaloom.stages.collect_rollouts import RolloutPosition, Sampler, play_episodes
from metaloom.stages.evaluate import _faults_in
from metaloom.stages.rollouts.faults import RolloutError
from metaloom.stages.rollouts.reproduce import reproduce
from metaloom.stages.rollouts.sampler import Enough

POLICY = PolicyConfig(hidden_sizes=(4,))
E, T, FIRST_TASK = 2, 5, 7


@pytest.fixture(autouse=True)
def hostile_envs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "hostile")


def config(fault: str, **options: int | str) -> EnvConfig:
    return EnvConfig(name="hostile_envs:Hostile", options={"fault": fault, **options})


def params(env: MetaEnv, num_tasks: int) -> TaskParams:
    assert env.observation_space.shape is not None
    assert env.action_space.shape is not None
    rng = np.random.default_rng(0)
    (O,), (A,) = env.observation_space.shape, env.action_space.shape
    shapes = {"hidden_0.kernel": (O, 4), "hidden_0.bias": (4,), "output.kernel": (4, A), "output.bias": (A,)}
    arrays = {f"mean_network.{n}": rng.normal(0, 0.1, (num_tasks, *s)) for n, s in shapes.items()}
    arrays["log_std"] = np.zeros((num_tasks, A))
    return TaskParams({name: array.astype(np.float32) for name, array in arrays.items()})


def rollout(env_config: EnvConfig, *, max_episode_steps: int = T, iteration: int = 4) -> EpisodeBatch:
    env = make_env(EnvConfig(name=env_config.name)) if ":" in env_config.name else make_env(env_config)
    sampler = Sampler(env_config, POLICY, episodes_per_task=E, max_episode_steps=max_episode_steps)
    tasks = draw_tasks(env, num_tasks=3, run_seed=1, iteration=0)
    position = RolloutPosition(1, iteration, 1, first_task=FIRST_TASK)
    return play_episodes(sampler, params(env, 3), tasks, position=position)


def fault(env_config: EnvConfig) -> RolloutError:
    with pytest.raises(RolloutError) as caught:
        rollout(env_config)
    return caught.value


IN_A_STEP = {
    "raise": "Hostile.step raised ValueError: my own bug",
    "raise_unpicklable": "Hostile.step raised hostile_envs.NotPicklable: carries a lock",
    "raise_unreadable": "Hostile.step raised hostile_envs.BadWords: <exception str() failed>",
    "sys_exit": "Hostile.step raised SystemExit: 3",
    "nan_observation": "got nan at index 0 of the observation; expected a finite number",
    "inf_reward": "got inf as reward; expected a finite number",
    "huge_observation": "got 3e+300 at index 0 of the observation; expected a finite number within float32",
    "huge_reward": "got 1e+300 as reward; expected a finite number within float32",
    "wrong_shape": "got an observation of dtype float32 and shape (2, 1); expected numbers of shape (2,)",
    "object_observation": "got an observation of dtype object",
    "text_observation": "got an observation of dtype <U1",
    "ragged_observation": "inhomogeneous shape",
    "array_reward": "got ndarray array([",
    "no_reward": "got NoneType None as reward; expected one number",
    "text_flag": "got str 'False' as terminated; expected True or False",
    "old_gym": "not enough values to unpack (expected 5, got 4)",
    "info_is_none": "got NoneType None as info; expected a dict",
    "ragged_terms": "inhomogeneous shape",
}
BEFORE_A_STEP = {
    "raise_in_set_task": ("set_task", "Hostile.set_task raised ValueError: unknown task"),
    "raise_in_reset": ("reset", "Hostile.reset raised ValueError: no start found"),
    "nan_in_reset": ("reset", "got nan at index 0 of the observation"),
    "reset_without_info": ("reset", "expected numbers of shape (2,)"),
    "new_space_per_task": ("reset", "must be the same in all tasks"),
}


@pytest.mark.parametrize(("name", "problem"), IN_A_STEP.items(), ids=IN_A_STEP)
def test_a_step_that_goes_wrong_is_an_error_with_its_place_and_the_actions_that_led_there(name, problem):
    error = fault(config(name))
    assert problem in str(error)
    words = "iteration 4, collect_rollouts k=1: hostile_envs:Hostile, task 7 (gain="
    assert str(error).startswith(words)
    seed = seed_for(1, "resets", 4, 1, FIRST_TASK, 0) % 2**32
    assert f"episode 0 (reset seed {seed}), step 2: " in str(error)
    about = error.about
    assert json.loads(json.dumps(about)) == about
    place = ("stage", "iteration", "step", "task", "episode", "seed", "env_step", "call", "run_seed")
    assert [about[name] for name in place] == ["collect_rollouts", 4, 1, 7, 0, seed, 2, "step", 1]
    good = rollout(config("none"))
    assert np.array_equal(error.arrays["actions"], good.actions[0, 0, :3])
    assert error.arrays["actions"].dtype == np.float32
    assert error.arrays["task"].tolist() == list(about["task_params"].values())


@pytest.mark.parametrize("name", ["raise", "raise_unpicklable", "sys_exit", "old_gym"])
def test_the_error_carries_the_environments_own_traceback(name):
    error = fault(config(name))
    assert "hostile_envs.py" in str(error) or "loop_batch.py" in str(error)
    assert error.about["traceback"].startswith("Traceback (most recent call last)")
    assert error.about["traceback"].rstrip() in str(error)


@pytest.mark.parametrize(("name", "expected"), BEFORE_A_STEP.items(), ids=BEFORE_A_STEP)
def test_what_goes_wrong_before_the_first_step_is_told_by_its_call(name, expected):
    call, problem = expected
    error = fault(config(name))
    assert problem in str(error) or "too many values to unpack" in str(error) or "not enough values" in str(error)
    assert (error.about["call"], error.about["env_step"]) == (call, None)
    assert {"make": "when it was made: ", "set_task": "in set_task: "}.get(call, "in reset: ") in str(error)
    assert error.arrays["actions"].shape == (0, 1)


@pytest.mark.parametrize("name", [*IN_A_STEP, *BEFORE_A_STEP])
def test_the_kept_actions_lead_to_the_same_error_in_one_environment(name):
    # Through pickling, as from a worker, and with plain JSON, as from a file. Workers send it without its cause: once
    # Dask is imported, pickle takes causes along, and this one may hold what cannot be pickled.
    found = fault(config(name))
    found.__cause__ = found.__context__ = None
    error = pickle.loads(pickle.dumps(found))
    about = json.loads(json.dumps(error.about))
    with pytest.raises(RolloutError) as again:
        reproduce(EnvConfig.model_validate(about["env"]), about, error.arrays)
    assert again.value.about == {**about, "traceback": again.value.about["traceback"]}
    assert str(again.value).partition("Its own traceback")[0] == str(error).partition("Its own traceback")[0]


def test_an_environment_that_was_mended_reproduces_no_error():
    error = fault(config("raise"))
    reproduce(config("none"), error.about, error.arrays)


def test_a_constructor_that_raises_is_refused_with_its_traceback():
    with pytest.raises(
        EnvError, match=r"raised ValueError: the licence server is away\nIts own traceback(.|\n)*hostile"
    ):
        rollout(config("raise_in_constructor"))


def test_tasks_that_cannot_be_drawn_name_the_environment():
    with pytest.raises(EnvError, match=r"Hostile.sample_tasks raised ValueError: no tasks today\nIts own traceback"):
        draw_tasks(make_env(config("raise_in_sample_tasks")), num_tasks=3, run_seed=1, iteration=0)


SOUND = [
    "float64",
    "read_only",
    "not_contiguous",
    "reused_buffer",
    "mutates_action",
    "strange_info",
    "changes_the_task",
]


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("action_scale", [10.0, None])
def test_answers_that_are_only_odd_give_the_episodes_of_a_well_behaved_environment(name, action_scale):
    expected = rollout(config("none").model_copy(update={"action_scale": action_scale}))
    found = rollout(config(name).model_copy(update={"action_scale": action_scale}))
    if name != "mutates_action":  # it rewards what it made of the action
        assert np.array_equal(found.rewards, expected.rewards)
    for array in ("observations", "actions", "lengths"):
        assert np.array_equal(getattr(found, array), getattr(expected, array)), array


def test_observations_outside_the_declared_box_are_kept_as_they_are():
    assert rollout(config("out_of_space")).observations[0, 0, 3, 0] == 3 - 1e5


def test_episodes_that_end_at_once_have_one_step():
    episodes = rollout(config("ends_at_once"))
    assert (episodes.lengths == 1).all()
    assert episodes.terminated.all()
    assert episodes.observations[:, :, 1, 0].tolist() == np.ones((3, E)).tolist()


@pytest.mark.slow
@pytest.mark.no_cover
def test_an_episode_of_tens_of_thousands_of_steps_ends_at_the_step_limit():
    env_config = config("none")
    sampler = Sampler(env_config, POLICY, episodes_per_task=1, max_episode_steps=20_000)
    env = make_env(env_config)
    tasks = draw_tasks(env, num_tasks=1, run_seed=1, iteration=0)
    episodes = play_episodes(sampler, params(env, 1), tasks, position=RolloutPosition(1, 0, 0))
    assert episodes.lengths.tolist() == [[20_000]]
    assert episodes.truncated.all()
    assert episodes.observations[0, 0, -1, 0] == 20_000


class Sound(Point2DGoal):
    """A batched robot."""


class Torn(Point2DGoal):
    """A batched robot that breaks in a way for which it names no row."""

    how = "raise"

    def reward_terms(self, states, next_states, tasks):
        if self.how == "raise":
            raise ArithmeticError("all at once")
        return {"distance": np.where(tasks[:, 0] == tasks[-1, 0], np.nan, -1.0)}


def test_a_batched_environment_that_raises_is_told_for_the_whole_shard_and_reproduced_as_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "torn_envs", type("m", (), {"Torn": Torn}))
    resets, reset = [], PointBatch.reset

    def watched(batch, tasks, seeds):
        resets.append((tasks.tolist(), [int(seed) for seed in seeds]))
        return reset(batch, tasks, seeds)

    monkeypatch.setattr(PointBatch, "reset", watched)
    error = fault(EnvConfig(name="torn_envs:Torn"))
    assert "torn_envs:Torn, one of tasks 7 to 9, step 0: step raised ArithmeticError: all at once" in str(error)
    seeds = [seed_for(1, "resets", 4, 1, FIRST_TASK + b, e) % 2**32 for b in range(3) for e in range(E)]
    assert error.about["seeds"] == seeds
    assert error.arrays["actions"].shape == (1, 3 * E, 2)
    with pytest.raises(RolloutError, match="one of tasks 7 to 9, step 0: step raised ArithmeticError"):
        reproduce(EnvConfig(name="torn_envs:Torn"), error.about, error.arrays)
    as_trained, again = resets  # every row with its own task and its own seed
    assert again == as_trained
    assert again[1] == seeds


def test_numbers_of_a_batched_robot_that_are_not_finite_name_the_episode_and_are_reproduced(monkeypatch):
    monkeypatch.setitem(sys.modules, "torn_envs", type("m", (), {"Torn": Torn}))
    monkeypatch.setattr(Torn, "how", "nan")
    error = fault(EnvConfig(name="torn_envs:Torn"))
    assert ", task 9 (goal_x=" in str(error)
    assert "step 0: rewards are not finite" in str(error)
    with pytest.raises(RolloutError, match="step 0: rewards are not finite"):
        reproduce(EnvConfig(name="torn_envs:Torn"), error.about, error.arrays)


@pytest.mark.parametrize(("call", "env_step", "when"), [("reset", None, "in reset"), ("step", 0, "step 0")])
def test_observations_of_a_batched_robot_that_are_not_finite_name_the_call(monkeypatch, call, env_step, when):
    monkeypatch.setitem(sys.modules, "torn_envs", type("m", (), {"Torn": Sound}))
    whole = getattr(PointBatch, call)

    def without_last(*arguments):
        found = whole(*arguments)
        (found if call == "reset" else found.observations)[-1] = np.nan
        return found

    monkeypatch.setattr(PointBatch, call, without_last)
    error = fault(EnvConfig(name="torn_envs:Torn"))
    assert f"episode {E - 1} (reset seed {error.about['seed']}), {when}: observations are not finite" in str(error)
    assert (error.about["call"], error.about["env_step"]) == (call, env_step)
    assert error.arrays["actions"].shape == (0 if env_step is None else 1, 2)


def test_a_policy_that_gives_no_numbers_is_told_apart_from_its_environment():
    env = make_env(config("none"))
    broken = params(env, 1)
    for name in broken.params:
        broken.params[name][:] = 1e38
    tasks = TaskBatch(np.ones((1, 1)), np.array([-1]), ("gain",), ("1",))
    sampler = Sampler(config("none"), POLICY, episodes_per_task=E, max_episode_steps=T)
    with pytest.raises(RolloutError, match=r"the policy returned the action .*; actions must be finite") as caught:
        play_episodes(sampler, broken, tasks, position=RolloutPosition(1, 0, 0))
    assert caught.value.about["call"] == "act"


def rollout_of_choices(fault: str) -> EpisodeBatch:
    """Two tasks, each in blocks of three episodes."""
    env_config = EnvConfig(name="hostile_envs:Choices", options={"fault": fault}, action_scale=None)
    weights = build_network("logits_network", NetworkSpec("mlp", (2,), 3, (4,))).initialize(np.random.default_rng(0))
    sampler = Sampler(env_config, POLICY, episodes_per_task=30, max_episode_steps=20, enough=Enough(60, None, 30, 20))
    tasks = draw_tasks(make_env(env_config), num_tasks=2, run_seed=1, iteration=0)
    position = RolloutPosition(4, 4, 0, first_task=FIRST_TASK)
    return play_episodes(sampler, TaskParams.broadcast(weights, 2), tasks, position=position)


def test_a_fault_among_choices_in_a_later_block_names_its_episode_and_is_reproduced():
    good = rollout_of_choices("none")
    b, e = np.argwhere(good.observations[:, :, 0, 1] > 0.9)[0]
    assert e >= 3, "expected a first faulty episode after the first block"
    with pytest.raises(RolloutError) as caught:
        rollout_of_choices("raise")
    about, arrays = json.loads(json.dumps(caught.value.about)), caught.value.arrays
    seed = seed_for(4, "resets", 4, 0, FIRST_TASK + b, e) % 2**32
    assert [about[name] for name in ("task", "episode", "seed", "env_step")] == [FIRST_TASK + b, e, seed, 2]
    assert np.array_equal(arrays["actions"][:, 0], good.actions[b, e, :3])
    with pytest.raises(RolloutError, match=f"episode {e} .*step 2: Choices.step raised ValueError: my own bug"):
        reproduce(EnvConfig.model_validate(about["env"]), about, arrays)


def test_ctrl_c_in_an_environment_is_no_fault_of_the_environment(monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        rollout(config("raise_keyboard_interrupt"))
    error = fault(config("raise"))
    with pytest.raises(KeyboardInterrupt):
        reproduce(config("raise_keyboard_interrupt"), error.about, error.arrays)

    def interrupted(*_):
        raise KeyboardInterrupt

    env = make_env(config("none"))
    monkeypatch.setattr(env.unwrapped, "sample_tasks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        draw_tasks(env, num_tasks=3, run_seed=1, iteration=0)


def test_the_same_interrupt_elsewhere_than_in_the_main_thread_is_a_fault_of_the_environment():
    with ThreadPoolExecutor(1) as elsewhere:
        error = elsewhere.submit(fault, config("raise_keyboard_interrupt")).result()
    assert "Hostile.step raised KeyboardInterrupt" in str(error)


def test_a_fault_in_an_evaluation_says_in_which_of_its_episodes():
    found = fault(config("raise"))

    def fail():
        with _faults_in("test episodes after 2 adaptation steps"):
            raise found

    with pytest.raises(RolloutError, match=r"Hostile.step raised ValueError: my own bug") as caught:
        fail()
    assert caught.value.about == {**found.about, "evaluation": "test episodes after 2 adaptation steps"}
    assert "test episodes after 2 adaptation steps" in str(caught.value)
    assert np.array_equal(caught.value.arrays["actions"], found.arrays["actions"])


@pytest.mark.parametrize("call", ["reset", "step"])
def test_a_batched_robot_with_observations_for_fewer_rows_is_refused(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "torn_envs", type("m", (), {"Torn": Sound}))
    whole = getattr(PointBatch, call)

    def fewer(*arguments):
        found = whole(*arguments)
        return found[:1] if call == "reset" else found._replace(observations=found.observations[:1])

    monkeypatch.setattr(PointBatch, call, fewer)
    error = fault(EnvConfig(name="torn_envs:Torn"))
    assert f"{call}: observations: got shape (1, 2); expected ({3 * E}, 2)" in str(error)
