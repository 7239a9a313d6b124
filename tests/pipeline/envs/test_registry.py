import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from metaloom.pipeline.config.sources import files_of
from metaloom.pipeline.envs.config import EnvConfig, gymnasium_limit, step_limits_left_open
from metaloom.pipeline.envs.contract import EnvError, MetaEnv, TaskField
from metaloom.pipeline.envs.facts import env_facts
from metaloom.pipeline.envs.flattening import FlatObservations
from metaloom.pipeline.envs.loop_batch import LoopBatch
from metaloom.pipeline.envs.registry import make_batch_env, make_env
from metaloom.pipeline.envs.spaces import spaces_of
from metaloom.pipeline.envs.wrappers import ActionMap, DiscreteActionMap, PolicyActions, SingleTask, is_bounded

MODULE = '''
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from metaloom.pipeline.envs.contract import MetaEnv, TaskField


class Plain(gymnasium.Env):
    """Counts; ends at `last`, or by its own time limit at 6."""

    observation_space = Box(0, 100, (1, 2), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)

    def __init__(self, last=100, action_type=np.float32):
        self.last, self.action_type = last, action_type

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.offset = 0, self.np_random.uniform()
        return self.observe(), {}

    def observe(self):
        return np.array([[self.t, self.offset]], np.float32)

    def step(self, action):
        assert action.dtype == self.action_type and self.action_space.contains(action)
        self.t += 1
        return self.observe(), float(action[0]), self.t == self.last, self.t == 6, {}


class Meta(Plain, MetaEnv):
    task_fields = (TaskField("gain", "1", "factor of the reward"),)

    def sample_tasks(self, num_tasks, rng):
        return rng.uniform(1, 2, (num_tasks, 1))

    def step(self, action):
        observation, reward, *ended, info = super().step(action)
        terms = {"gain": self.task[0], "action": reward}
        return observation, sum(terms.values()), *ended, {"reward_terms": terms}


class Wrong(Meta):
    def step(self, action):
        observation, reward, *ended, info = super().step(action)
        return observation, reward + 1, *ended, info


class Unsteady(Meta):
    def step(self, action):
        observation, reward, *ended, info = super().step(action)
        terms = {f"t{self.t}": reward}
        return observation, reward, *ended, {"reward_terms": terms}


class Choices(Plain):
    action_space = Discrete(3)


class Endless(Plain):
    action_space = Box(-np.inf, np.inf, (1,), np.float32)


class Shown(Plain):
    def state_vector(self):
        return np.array([self.offset])


class TasksInAnArray(Meta):
    task_set = np.array([[1.0], [2.0]])


class TasksOfTwo(Meta):
    task_set, test_task_set = ((1.0,), (2.0,)), ((1.0, 2.0),)


class Still(Plain):
    action_space = Box(-1, 1, (0,), np.float32)


class NotAnEnv:
    pass
'''


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_envs.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_envs", raising=False)


def test_a_meta_env_of_ones_own_is_found_by_its_path_in_the_working_folder() -> None:
    env = make_env(EnvConfig(name="own_envs:Meta", options={"last": 3}))
    env.set_task(np.array([1.5]))
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step(np.array([5.0], np.float32))
    assert reward == 2.0
    assert info["reward_terms"] == {"gain": 1.5, "action": 0.5}
    assert not terminated


def test_an_env_without_an_action_is_refused() -> None:
    with pytest.raises(EnvError, match=r"Still has the action space Box\(.*\(0,\), float32\); expected .* non-empty"):
        make_env(EnvConfig(name="own_envs:Still"))


def test_a_plain_gymnasium_env_is_a_meta_env_with_one_task() -> None:
    env = make_env(EnvConfig(name="own_envs:Plain"))
    assert isinstance(env.env, SingleTask)  # pyright: ignore[reportAttributeAccessIssue]
    assert env.task_fields == ()
    env.reset(seed=0)
    assert env.step(np.array([5.0], np.float32))[1] == 0.5


def test_a_loop_of_envs_keeps_termination_and_the_envs_own_truncation_apart() -> None:
    batch = make_batch_env(EnvConfig(name="own_envs:Meta", options={"last": 6}), 3)
    assert isinstance(batch, LoopBatch)
    assert (batch.observation_size, batch.action_size) == (2, 1)
    first = batch.reset(np.array([[1.0], [2.0], [3.0]]), np.array([5, 6, 2**64 - 1], np.uint64))
    assert np.array_equal(
        first, [make_env(EnvConfig(name="own_envs:Meta")).reset(seed=s)[0][0] for s in (5, 6, 2**64 - 1)]
    )
    rows = np.array([0, 2])
    for t in range(1, 7):
        step = batch.step(np.full((2, 1), 10.0, np.float32), rows)
        assert np.array_equal(step.observations[:, 0], [t, t])
        assert np.array_equal(step.reward_terms["gain"], [1.0, 3.0])
        assert np.array_equal(step.reward_terms["action"], [1.0, 1.0])
        assert step.terminated.tolist() == step.truncated.tolist() == [t == 6] * 2
    assert batch.step(np.zeros((1, 1), np.float32), np.array([1])).observations[0, 0] == 1
    assert batch.state.shape == (3, 0)
    batch.close()


def test_a_loop_of_envs_records_the_state_that_gymnasiums_mujoco_envs_show() -> None:
    batch = make_batch_env(EnvConfig(name="own_envs:Shown"), 2)
    first = batch.reset(np.zeros((2, 0)), np.array([5, 6], np.uint64))
    assert np.array_equal(batch.state.astype(np.float32), first[:, 1:])


def test_states_of_several_sizes_are_not_recorded() -> None:
    sizes = iter((1, 2, 2))

    def make() -> MetaEnv:
        env, size = make_env(EnvConfig(name="own_envs:Shown")), next(sizes)
        env.unwrapped.state_vector = lambda: np.zeros(size)  # pyright: ignore[reportAttributeAccessIssue]
        return env

    assert LoopBatch(make, 3).state.shape == (3, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("half-cheeta-dir", r"^env.name is 'half-cheeta-dir'; did you mean half-cheetah-dir\?\n.*recipes --envs"),
        ("no-such-thing-at-all", r"which is unknown\n.*Hopper-v5; or module:Class"),
        ("own_envs:Missing", r"env.name: got 'own_envs:Missing': .*no attribute 'Missing'; expected module:Class"),
        ("nowhere:Env", r"No module named 'nowhere'; expected module:Class .*, with the module in "),
        (":Env", r"expected module:Class"),
        (
            "own_envs:TasksInAnArray",
            r"(?s)TasksInAnArray.task_set: got array.*a tuple of 1 numbers.*tuple\(map\(tuple",
        ),
        ("own_envs:TasksOfTwo", r"TasksOfTwo.test_task_set: got \(\(1.0, 2.0\),\); expected"),
        ("own_envs:NotAnEnv", r"the class own_envs:NotAnEnv; expected a subclass of gymnasium"),
        (
            "own_envs:Choices",
            r"env.action_scale is 10, but the actions Discrete\(3\) .* --set env.action_scale=null",
        ),
        ("own_envs:Endless", r"has no bounds, so action_scale 10.0 .* --set env.action_scale=null"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_with_what_can(name: str, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make_env(EnvConfig(name=name))


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("point-corner", "allowed: reward"), ("point-2d", "allowed: none"), ("half-cheetah-dir", "allowed: obs_style")],
)
def test_an_unknown_option_is_refused_with_those_there_are(name: str, allowed: str) -> None:
    with pytest.raises(EnvError, match=f"env.options of {name} are .*'speed'; {allowed}"):
        make_env(EnvConfig(name=name, options={"speed": 3}))


def test_reward_terms_that_do_not_sum_to_the_reward_are_refused() -> None:
    batch = make_batch_env(EnvConfig(name="own_envs:Wrong"), 1)
    batch.reset(np.ones((1, 1)), np.zeros(1, np.uint64))
    with pytest.raises(EnvError, match=r"Wrong.step: .*sums to 1.0, but the reward is 2.0"):
        batch.step(np.zeros((1, 1), np.float32), np.arange(1))


def test_reward_terms_that_change_their_names_are_refused() -> None:
    batch = make_batch_env(EnvConfig(name="own_envs:Unsteady"), 1)
    batch.reset(np.ones((1, 1)), np.zeros(1, np.uint64))
    batch.step(np.zeros((1, 1), np.float32), np.arange(1))
    with pytest.raises(EnvError, match=r"has \['t2'\]; every step must have the terms of the first, \['t1'\]"):
        batch.step(np.zeros((1, 1), np.float32), np.arange(1))


def test_an_env_that_gymnasium_knows_comes_without_its_time_limit() -> None:
    env = make_env(EnvConfig(name="MountainCarContinuous-v0", action_scale=None))
    env.reset(seed=0)
    assert not any(env.step(np.zeros(1, np.float32))[3] for _ in range(1000))  # its limit is 999 steps


def test_an_env_that_gymnasium_cannot_make_says_why() -> None:
    with pytest.raises(EnvError, match=r"gymnasium cannot make 'Pendulum-v1' with options \{'weight': 1\}"):
        make_env(EnvConfig(name="Pendulum-v1", options={"weight": 1}))
    with pytest.raises(EnvError, match="use the run's own setting instead: --set max_episode_steps=60"):
        make_env(EnvConfig(name="Pendulum-v1", options={"max_episode_steps": 60}))


def test_without_a_scale_actions_reach_the_env_as_they_are_but_inside_its_box() -> None:
    env = make_env(EnvConfig(name="point-corner", action_scale=None, options={"reward": "dense"}))
    start, _ = env.reset(seed=0)
    place, *_ = env.step(np.array([0.05, -7.0]))
    np.testing.assert_allclose(place - start, [0.05, -0.2], atol=1e-12)
    assert env.action_space == env.unwrapped.action_space


def test_reading_the_registry_imports_no_simulator_and_no_torch() -> None:
    code = "import sys, metaloom.pipeline.envs; assert not {'torch', 'mujoco'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_a_worker_that_samples_half_cheetah_imports_no_torch() -> None:
    code = (
        "import sys, metaloom.stages.collect_rollouts, metaloom.pipeline.envs.registry as e; "
        "e.make_batch_env(e.EnvConfig(name='half-cheetah-dir'), 4); "
        "assert 'mujoco' in sys.modules and not {'torch', 'prefect', 'dask'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_a_warning_of_mujoco_is_printed_once_and_no_log_is_written(tmp_path: Path) -> None:
    """Gymnasium's model of the half-cheetah has an attribute that MuJoCo 4 warns of on every load."""
    code = (
        "from metaloom.pipeline.envs.config import EnvConfig\n"
        "from metaloom.pipeline.envs.registry import make_env\n"
        "import gymnasium, mujoco\n"
        "for _ in range(2): make_env(EnvConfig(name='HalfCheetah-v5'))\n"
        'for _ in range(2): mujoco.MjModel.from_xml_string(\'<mujoco><compiler settotalmass="1"/>'
        '<worldbody><body><joint/><geom size="1"/></body></worldbody></mujoco>\')\n'
        "handler = mujoco.get_mju_user_warning()\n"
        "for t in range(2): handler(f'the simulation is unstable. Time = {t}.0000.')\n"
        "import sys; sys.stderr.close(); handler('nobody reads this')\n"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True, text=True).stderr
    lines = [line for line in said.splitlines() if line]
    assert len(lines) == len(set(lines))
    assert [line.startswith("MuJoCo warns: ") for line in lines] == [True] * len(lines)
    assert lines[-1] == "MuJoCo warns: the simulation is unstable."
    assert not (tmp_path / "MUJOCO_LOG.TXT").exists()


def test_states_that_are_numbered_become_unit_vectors() -> None:
    env = make_env(EnvConfig(name="FrozenLake-v1", action_scale=None, options={"is_slippery": False}))
    first, _ = env.reset(seed=0)
    second, *_ = env.step(np.int64(1))  # one row down on a lake of 4 x 4
    assert env.observation_space.shape == (16,)
    assert (np.nonzero(first)[0].tolist(), np.nonzero(second)[0].tolist()) == ([0], [4])


REGISTERS = """
import gymnasium
from gymnasium.envs.registration import register

register("Own-v3", "own_envs:Plain", max_episode_steps=17, kwargs={"last": 4})
"""


def test_a_gymnasium_id_may_name_the_module_that_registers_it(tmp_path) -> None:
    (tmp_path / "registers.py").write_text(REGISTERS)
    config = EnvConfig(name="registers:Own-v3", options={"last": 9})
    assert gymnasium_limit(config.name) == 17
    env = make_env(config)
    assert env.unwrapped.last == 9  # pyright: ignore[reportAttributeAccessIssue]
    assert env_facts(config, env)["class"] == "own_envs:Plain"
    assert env_facts(config, env)["observation_shape"] == [1, 2]
    with pytest.raises(EnvError, match="No module named 'nowhere'"):
        make_env(EnvConfig(name="nowhere:Own-v3"))


@pytest.mark.parametrize("name", ["Short", "Nested/Short", "Nested/Short-v2"])
def test_an_id_needs_no_version_and_keeps_its_limit_where_the_environment_reads_it(name, tmp_path) -> None:
    registers = f"gymnasium.register({name!r}, 'own_envs:Plain', max_episode_steps=30)"
    (tmp_path / "limited.py").write_text(f"import gymnasium\n{registers}")
    config = EnvConfig(name=f"limited:{name}")
    assert gymnasium_limit(config.name) == 30
    assert make_env(config).unwrapped.spec.max_episode_steps == 30
    assert files_of([config.name])[config.name] == tmp_path / "limited.py"
    del gymnasium.registry[name], sys.modules["limited"]


def test_a_name_that_the_module_defines_is_its_class_even_if_it_is_an_id_too(tmp_path) -> None:
    code = "import gymnasium\nfrom own_envs import Choices\ngymnasium.register('Choices', 'own_envs:Plain')"
    (tmp_path / "shadows.py").write_text(code)
    env = make_env(EnvConfig(name="shadows:Choices", action_scale=None))
    assert env.action_space == Discrete(3)
    del gymnasium.registry["Choices"], sys.modules["shadows"]


def test_parts_of_an_action_are_counted_with_the_last_one_fastest() -> None:
    found = DiscreteActionMap(MultiDiscrete([2, 3], start=[0, 5]), None)(np.array([0, 2, 4]))
    assert found.tolist() == [[0, 5], [0, 7], [1, 6]]


class Quits(gymnasium.Env):
    observation_space, action_space = Box(-1, 1, (1,)), Box(-1, 1, (1,), np.float32)

    def __init__(self, how="exit"):
        if how == "exit":
            sys.exit()
        if how == "assert":
            raise AssertionError

    def close(self):
        raise AttributeError("no viewer before the first reset")


@pytest.mark.parametrize(("how", "words"), [("exit", "it raised SystemExit"), ("assert", "it raised AssertionError")])
def test_an_id_that_cannot_be_made_says_why_even_without_a_message(how, words) -> None:
    gymnasium.register("Quits-v0", Quits)
    with pytest.raises(EnvError, match=words):
        make_env(EnvConfig(name="Quits-v0", options={"how": how}))
    del gymnasium.registry["Quits-v0"]


def test_an_environment_that_cannot_be_closed_is_closed_once_and_named(caplog) -> None:
    env = PolicyActions(SingleTask(Quits("")), None)
    env.close()
    env.close()
    assert [record.message for record in caplog.records] == [
        "Quits.close raised AttributeError: no viewer before the first reset"
    ]


class Clashing(gymnasium.Env):
    """Has attributes of our names, for something else."""

    observation_space, action_space = Box(-1, 1, (1,)), Box(-1, 1, (1,), np.float32)

    def __init__(self, terms=None):
        self.terms, self.state_vector = terms, np.zeros((2, 2))
        self.facts, self.recorded = {"gravity": 9.81}, ["frame 1", "frame 2"]

    def reset(self, *, seed=None, options=None):
        return np.zeros(1), {}

    def step(self, action):
        return np.zeros(1), 2.0, False, False, {"reward_terms": self.terms, "facts": ["round"]}


@pytest.mark.parametrize("terms", [None, ["speed", "energy"], {"speed": 1.0}, {"speed": "fast"}])
def test_names_of_ours_that_mean_something_else_in_an_environment_are_left_alone(terms, caplog) -> None:
    config = EnvConfig(name=f"{__name__}:Clashing", options={"terms": terms}, action_scale=None)
    batch = make_batch_env(config, 2)
    batch.reset(np.zeros((2, 0)), np.arange(2, dtype=np.uint64))
    for _ in range(3):
        step = batch.step(np.zeros((2, 1), np.float32), np.arange(2))
        assert {name: values.tolist() for name, values in step.reward_terms.items()} == {"reward": [2.0, 2.0]}
    (said,) = {record.message for record in caplog.records}
    assert re.fullmatch("Clashing: .* this environment's reward terms are not stored", said)
    assert len(caplog.records) == 2  # once for each copy
    assert batch.state.shape == (2, 0)
    assert "frame 1" not in str(env_facts(config, make_env(config)))


@pytest.mark.parametrize("bound", [np.inf, np.finfo(np.float32).max, 1e38])
def test_a_box_bounded_by_the_largest_number_has_no_bounds(bound) -> None:
    box = Box(-bound, bound, (1,), np.float32)
    with pytest.raises(EnvError, match="has no bounds"):
        ActionMap(box, 1.0)
    image = Clashing()
    image.observation_space = Box(-bound, bound, (8, 8, 3), np.float32)
    assert spaces_of(image).observation_scale == 1
    # Of arrays with two axes, only those of bytes are images.
    cases = ((0.5, (8, 8, 3), np.float32, 0.5), (200, (8, 8), np.uint8, 200), (200, (8, 8), np.float32, 1))
    for high, shape, dtype, scale in (*cases, (200, (8,), np.uint8, 1)):
        image.observation_space = Box(0, high, shape, dtype)
        assert spaces_of(image).observation_scale == scale


@pytest.mark.parametrize(("low", "high"), [(-1e30, 1), (-1, 1e30)])
def test_a_bound_of_1e30_is_none(low, high) -> None:
    assert not is_bounded(Box(low, high, (1,), np.float64))
    assert is_bounded(Box(0.99 * low, 0.99 * high, (1,), np.float64))


def test_a_function_is_not_called_to_find_out_what_it_makes(monkeypatch) -> None:
    monkeypatch.setattr("os.system", pytest.fail)
    for path in ("os:system", "subprocess:run"):
        with pytest.raises(EnvError, match="expected a subclass of gymnasium"):
            make_env(EnvConfig(name=path, options={"command": "true", "args": "true"}))


class Rooms(MetaEnv):
    """Three rooms, numbered from 5; every door leads to the same one."""

    task_fields = (TaskField("door", "1", "that leads on"),)
    observation_space, action_space = Discrete(3, start=5), Discrete(2)

    def __init__(self, leads_to=6):
        self.leads_to = leads_to

    def sample_tasks(self, num_tasks, rng):
        return rng.integers(2, size=(num_tasks, 1)).astype(float)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 5, {}

    def step(self, action):
        assert isinstance(action, np.integer)
        return self.leads_to, 0.0, False, False, {}


def rooms(**options):
    return EnvConfig(name=f"{__name__}:Rooms", options=options, action_scale=None)


def test_the_states_of_a_meta_env_are_seen_as_unit_vectors():
    env = make_env(rooms())
    assert env.observation_space.shape == (3,)
    env.set_task(np.zeros(1))
    np.testing.assert_array_equal(env.reset(seed=0)[0], [1, 0, 0])
    np.testing.assert_array_equal(env.step(1)[0], [0, 1, 0])
    batch = make_batch_env(rooms(), 2)
    batch.reset(np.zeros((2, 1)), np.arange(2, dtype=np.uint64))
    np.testing.assert_array_equal(batch.step(np.array([0, 1]), np.arange(2)).observations, [[0, 1, 0]] * 2)


def test_parts_of_an_observation_are_named_unless_they_are_too_many_or_two_have_one_name():
    def named(**parts):
        env = gymnasium.Env()
        env.observation_space = Dict(parts)
        found = FlatObservations(env)
        return found.observation_components if found.has_wrapper_attr("observation_components") else None

    number = Box(0, 1, ())
    assert named(**{"a b": number, "c": Discrete(2)}) == [("a_b", "1"), ("c.0", "1"), ("c.1", "1")]
    assert named(c=Discrete(2)) == [("c.0", "1"), ("c.1", "1")]
    with pytest.raises(EnvError, match=r"has the observation space Dict\(\); expected"):
        named()
    assert named(**{"a b": number, "a_b": number}) is None
    names = [name for name, _ in named(x=Box(0, 1, (999,)), y=number)]
    assert [names[0], *names[-2:]] == ["x.0", "x.998", "y"]
    assert named(x=Box(0, 1, (1000,)), y=number) is None


@pytest.mark.parametrize("state", [4, 8, 6.0, None])
def test_a_state_that_there_is_not_is_refused(state):
    env = make_env(rooms(leads_to=state))
    env.set_task(np.zeros(1))
    env.reset(seed=0)
    with pytest.raises(EnvError, match=rf"got the observation {state}; expected an integer in Discrete\(3, start=5\)"):
        env.step(0)


class Interrupted(gymnasium.Wrapper):
    """Is interrupted by Ctrl-C while it is made."""

    def __init__(self, env=None):
        raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["made", "made of a class", "wrapped", "closed"])
def test_ctrl_c_is_no_fault_of_an_environment(monkeypatch, when) -> None:
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "interrupted", type("m", (), {"Wrapper": Interrupted}))
    config = EnvConfig(
        name="CartPole-v1", action_scale=None, wrappers=["interrupted:Wrapper"] if when == "wrapped" else []
    )
    if when == "made of a class":
        config = EnvConfig(name="interrupted:Wrapper", action_scale=None)
    if when == "made":
        monkeypatch.setattr(gymnasium, "make", interrupted)
    if when != "closed":
        with pytest.raises(KeyboardInterrupt):
            make_env(config)
        return
    env = make_env(config)
    monkeypatch.setattr(env.unwrapped, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        env.close()


def test_the_module_of_a_gymnasium_id_must_be_there_and_other_names_are_refused_where_they_are_used() -> None:
    with pytest.raises(ValueError, match="no_such_module"):
        gymnasium_limit("no_such_module:Thing-v0")
    assert gymnasium_limit("no_such_module:Thing") is None
    assert gymnasium_limit("CartPole-v1") == 500
    with step_limits_left_open():
        assert gymnasium_limit("no_such_module:Thing-v0") is None


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [
        ("no_such_module:Wrapper", "^env.wrappers: .*no_such_module"),
        (
            "FlattenObservatio",
            r"^env.wrappers: no wrapper 'FlattenObservatio'; did you mean FlattenObservation\?\nUse a class",
        ),
        ("NormalizeObservation", "the statistics of NormalizeObservation come from one copy of the environment"),
        ("NormalizeReward", "the statistics of NormalizeReward come from one copy of the environment"),
        (
            {"name": "RecordVideo", "options": {"video_folder": "x"}},
            "with RecordVideo, every copy .* would write",
        ),
        (
            {"name": "TimeLimit", "options": {"steps": 3}},
            "^env.wrappers: TimeLimit with .*'steps'.*; allowed: max_episode_st",
        ),
        (
            "TimeAwareObservation",
            "^env.wrappers: TimeAwareObservation with .* raised .*; the environment sets no step",
        ),
        (
            {"name": "ResizeObservation", "options": {"shape": [2, 2]}},
            r"^env.wrappers: ResizeObservation with .* raised (.|\n)*; the environment has observations in Box",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value["name"],
)
def test_a_wrapper_that_no_run_can_have_is_refused(monkeypatch, wrapper, words) -> None:
    monkeypatch.setitem(sys.modules, "clashing", type("m", (), {"Clashing": Clashing}))
    with pytest.raises(EnvError, match=words):
        make_env(EnvConfig(name="clashing:Clashing", wrappers=[wrapper]))
