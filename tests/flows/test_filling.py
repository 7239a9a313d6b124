"""Workers that collect until there are enough steps, and by other actors than the algorithm's."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from metaloom.flows.rollouts.dask import DaskWorkers
from metaloom.flows.rollouts.workers import Backend, LocalWorkers, SamplerSpec, collect_shard
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.tasks.samplers import draw_tasks
from metaloom.pipeline.types import EpisodeBatch, TaskBatch, TaskParams
from metaloom.stages.collect_rollouts import RolloutPosition
from metaloom.stages.rollouts.sampler import tasks_together

pytestmark = pytest.mark.usefixtures("warm")

B, T = 5, 30
CARTPOLE = SamplerSpec(
    env=EnvConfig(name="CartPole-v1", action_scale=None),
    policy=PolicyConfig(hidden_sizes=(4,)),
    episodes_per_task=2,
    max_episode_steps=T,
    threads=1,
    actor="q_values",
)
POSITION = RolloutPosition(1, 0, -1)


def tasks(spec: SamplerSpec) -> TaskBatch:
    return draw_tasks(make_env(spec.env), num_tasks=B, run_seed=1, iteration=0)


def q_network() -> TaskParams:
    rng, params = np.random.default_rng(0), {}
    for layer, rows, columns in (("hidden_0", 4, 4), ("output", 4, 2)):
        params[f"q_network.{layer}.kernel"] = rng.normal(size=(rows, columns)).astype(np.float32)
        params[f"q_network.{layer}.bias"] = rng.normal(size=columns).astype(np.float32)
    return TaskParams(TaskParams.broadcast(params, B).params | {"epsilon": np.full(B, 0.5, np.float32)})


def assert_same_bits(a: EpisodeBatch, b: EpisodeBatch) -> None:
    for name, value in vars(a).items():
        if isinstance(value, np.ndarray):
            assert value.tobytes() == getattr(b, name).tobytes(), name
    assert {name: v.tobytes() for name, v in a.behavior.items()} == {n: v.tobytes() for n, v in b.behavior.items()}


def test_a_filling_has_enough_steps_of_every_task_in_whole_episodes():
    episodes = LocalWorkers(CARTPOLE).filling(100, actor="uniform").collect(TaskParams({}), tasks(CARTPOLE), POSITION)
    assert (episodes.lengths.sum(axis=1) >= 100).all()
    numbers = episodes.real.sum(axis=1)
    assert numbers.min() >= 4  # ceil(100 / 30) side by side
    assert not (numbers % 4).any()
    assert len(set(numbers)) > 1
    assert episodes.lengths.shape == (B, numbers.max())
    assert np.array_equal(episodes.terminated ^ episodes.truncated, episodes.real)


def test_a_filling_is_by_the_actor_that_is_asked_for():
    uniform = LocalWorkers(CARTPOLE).filling(50, actor="uniform").collect(TaskParams({}), tasks(CARTPOLE), POSITION)
    by_value = LocalWorkers(CARTPOLE).filling(50, actor="q_values").collect(q_network(), tasks(CARTPOLE), POSITION)
    assert not uniform.behavior
    assert by_value.behavior.keys() == {"action_values", "epsilon"}
    assert (by_value.lengths.sum(axis=1) >= 50).all()


def test_sampling_keeps_the_actor_unless_another_is_named():
    workers = LocalWorkers(CARTPOLE)
    assert workers.sampling(3, deterministic=True).spec.actor == "q_values"
    assert workers.sampling(3, deterministic=False, actor="uniform").spec.actor == "uniform"
    filling = workers.filling(10, actor="uniform")
    assert filling.sampling(3, deterministic=True, actor="q_values") == workers.sampling(3, deterministic=True)


def test_the_actor_is_the_algorithms(tiny_config):
    config = tiny_config()
    assert SamplerSpec.of(config, threads=1).actor == "policy"
    off_policy = config.model_construct(
        **{**dict(config), "algorithm": type("Settings", (), {"actor": "tanh_gaussian", "trial": None})}
    )
    assert SamplerSpec.of(off_policy, threads=1).actor == "tanh_gaussian"


@pytest.mark.parametrize(
    "spec",
    [
        LocalWorkers(CARTPOLE).filling(100, actor="uniform").spec,
        LocalWorkers(CARTPOLE).filling(100, actor="q_values").spec,
        LocalWorkers(CARTPOLE).sampling(2, deterministic=True).spec,
    ],
    ids=["uniform", "q_values", "greedy"],
)
def test_shards_by_a_pickled_spec_give_the_bits_of_the_whole(spec):
    whole = LocalWorkers(spec).collect(q_network(), tasks(spec), POSITION)
    there = pickle.loads(pickle.dumps(spec))
    assert there == spec
    shards = [(0, 2), (2, 3), (3, 5)]
    parts = [
        collect_shard(there, q_network().slice(*ends), tasks(spec).slice(*ends), replace(POSITION, first_task=ends[0]))
        for ends in shards
    ]
    assert_same_bits(tasks_together(parts), whole)


@pytest.mark.dask
@pytest.mark.slow
def test_worker_processes_fill_with_the_bits_of_this_process():
    backend = Backend(workers=2).for_tasks(B)
    with DaskWorkers.started(CARTPOLE, backend) as workers:
        for actor, params in (("uniform", TaskParams({})), ("q_values", q_network())):
            there = workers.filling(100, actor=actor).collect(params, tasks(CARTPOLE), POSITION)
            assert_same_bits(
                there, LocalWorkers(CARTPOLE).filling(100, actor=actor).collect(params, tasks(CARTPOLE), POSITION)
            )
        greedy = workers.sampling(2, deterministic=True).collect(q_network(), tasks(CARTPOLE), POSITION)
        here = LocalWorkers(CARTPOLE).sampling(2, deterministic=True).collect(q_network(), tasks(CARTPOLE), POSITION)
        assert_same_bits(greedy, here)
