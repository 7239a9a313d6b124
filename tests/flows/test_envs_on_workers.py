"""Every registered environment in another process: its tasks arrive there, and its episodes have the same bits."""

import random
from collections.abc import Iterator
from importlib import import_module
from operator import methodcaller

import numpy as np
import pytest
from distributed import Client
from env_names import ENV_NAMES
from gymnasium.spaces import Discrete

from metaloom.flows.rollouts import supervised
from metaloom.flows.rollouts.connection import connected
from metaloom.flows.rollouts.workers import Backend, SamplerSpec, collect_shard
from metaloom.pipeline.algorithms.maml.settings import ProMP
from metaloom.pipeline.algorithms.trials.settings import RL2
from metaloom.pipeline.building import build_learner
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.tasks.samplers import draw_tasks
from metaloom.stages.collect_rollouts import RolloutPosition

pytestmark = [pytest.mark.dask, pytest.mark.slow, pytest.mark.usefixtures("warm")]


def run_config(name: str) -> RunConfig:
    algorithm = RL2() if isinstance(make_env(EnvConfig(name=name)).action_space, Discrete) else ProMP()
    return RunConfig(
        env=EnvConfig(name=name), algorithm=algorithm, num_tasks=2, episodes_per_task=2, max_episode_steps=8
    )


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with connected(Backend(workers=1), SamplerSpec.of(run_config("point-corner"), threads=1), "a-session") as there:
        yield there.client


def test_dask_draws_from_the_global_generator_neither_here_nor_in_a_worker(client: Client) -> None:
    # A worker imports this module with the first work that it gets.
    client.submit(import_module, supervised.__name__, pure=False).result()
    before, there = random.getstate(), client.submit(random.getstate, pure=False).result()
    assert client.submit(list, range(1000), pure=False).result() == list(range(1000))
    assert client.submit(random.getstate, pure=False).result() == there
    assert random.getstate() == before


@pytest.mark.parametrize("name", ENV_NAMES)
def test_a_task_and_an_env_in_mid_episode_survive_the_way_to_a_worker(name: str, client: Client) -> None:
    env = make_env(EnvConfig(name=name))
    env.set_task(env.sample_tasks(2, np.random.default_rng(8))[1])
    env.reset(seed=1)
    assert np.array_equal(client.submit(getattr, env, "task", pure=False).result(), env.task)
    action = 1 if isinstance(env.action_space, Discrete) else np.full(env.action_space.shape, 3.0)
    there = client.submit(methodcaller("step", action), env, pure=False).result()
    for ours, theirs in zip(env.step(action), there, strict=True):
        assert np.array_equal(ours, theirs) if isinstance(ours, np.ndarray) else ours == theirs


@pytest.mark.parametrize("name", ENV_NAMES)
def test_a_shard_of_tasks_gives_the_same_bits_there_and_here(name: str, client: Client) -> None:
    config = run_config(name)
    env = make_env(config.env)
    _, learner, _ = build_learner(config)
    params = learner.acting_params(learner.initialize(run_seed=1), 2)
    tasks = draw_tasks(env, num_tasks=2, run_seed=1, iteration=0)
    shard = (SamplerSpec.of(config, threads=1), params, tasks, RolloutPosition(1, 0, 0))
    there, here = client.submit(collect_shard, *shard, pure=False).result(), collect_shard(*shard)
    for field in ("observations", "actions", "rewards", "terminated", "lengths", "initial_state"):
        assert getattr(there, field).tobytes() == getattr(here, field).tobytes(), field
