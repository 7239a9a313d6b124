"""Rollouts by the actors of off-policy learners: the same bits however they are computed, and what is recorded."""

import sys
from dataclasses import dataclass, replace
from types import ModuleType

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.point import Point2DGoal
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.policies.config import ActorKind, PolicyConfig
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.tasks.samplers import draw_tasks
from metaloom.pipeline.types import EpisodeBatch, Params, TaskBatch, TaskParams
from metaloom.stages.collect_rollouts import RolloutPosition, Sampler, play_episodes

POLICY = PolicyConfig(hidden_sizes=(9, 6))
TORCH = PolicyConfig(hidden_sizes=(9, 6), activation="SiLU")
B, E, T, Z = 6, 4, 20, 3


class Fading(Point2DGoal):
    """Ends at chance moments that depend on the place."""

    def terminal(self, states: np.ndarray, tasks: np.ndarray) -> np.ndarray:
        return np.modf(np.abs(states[:, 0]) * 1e4)[0] < 0.08


class Looped(Fading):
    """Fading without a batch of its own."""

    def batch(self, num_rows: int, num_threads: int) -> None:
        return None


class Steering(gymnasium.Env):
    """Ends after 1 to 20 steps, as drawn at the reset; three actions."""

    observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    action_space = Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left, self.place = int(self.np_random.integers(1, 21)), self.np_random.normal()
        return np.array([self.left / 20, self.place], np.float32), {}

    def step(self, action):
        self.left -= 1
        self.place += float(action) - 1 + 0.1 * self.np_random.normal()
        return np.array([self.left / 20, self.place], np.float32), -abs(self.place), self.left == 0, False, {}


@pytest.fixture(autouse=True)
def own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("actor_envs")
    module.__dict__.update(Fading=Fading, Looped=Looped, Steering=Steering)
    monkeypatch.setitem(sys.modules, "actor_envs", module)


def network(prefix: str, inputs: int, outputs: int) -> Params:
    rng, sizes, params = np.random.default_rng(0), [inputs, *POLICY.hidden_sizes, outputs], {}
    for layer, rows, columns in zip(("hidden_0", "hidden_1", "output"), sizes[:-1], sizes[1:], strict=True):
        params[f"{prefix}.{layer}.kernel"] = rng.normal(0, 0.5, (rows, columns)).astype(np.float32)
        params[f"{prefix}.{layer}.bias"] = rng.normal(0, 0.5, columns).astype(np.float32)
    return params


@dataclass(frozen=True)
class Case:
    """An actor in an environment, with parameters of which the networks are shared by all tasks."""

    actor: ActorKind
    env: str
    shared: Params
    own: Params
    policy: PolicyConfig = POLICY

    def __str__(self) -> str:
        details = "-belief" * ("belief.mean" in self.own) + "-torch" * (self.policy is TORCH)
        return f"{self.actor}{details}-{self.env}"

    @property
    def config(self) -> EnvConfig:
        return EnvConfig(name=f"actor_envs:{self.env}", action_scale=None if self.env == "Steering" else 1.0)

    def params(self) -> TaskParams:
        return TaskParams(TaskParams.broadcast(self.shared, B).params | self.own)

    def tasks(self) -> TaskBatch:
        return draw_tasks(make_env(self.config), num_tasks=B, run_seed=1, iteration=0)

    def collect(self, shards=((0, B),), *, deterministic: bool = False, E: int = E, threads: int = 1, **place):
        sampler = Sampler(
            self.config,
            self.policy,
            episodes_per_task=E,
            max_episode_steps=T,
            num_threads=threads,
            actor=self.actor,
            deterministic=deterministic,
        )
        position = RolloutPosition(1, place.get("iteration", 2), place.get("step", 0))
        return EpisodeBatch.concatenate(
            [
                play_episodes(
                    sampler,
                    self.params().slice(*ends),
                    self.tasks().slice(*ends),
                    position=replace(position, first_task=ends[0]),
                )
                for ends in shards
            ]
        )


BELIEF = {
    "belief.mean": np.random.default_rng(1).normal(size=(B, Z)).astype(np.float32),
    "belief.variance": np.random.default_rng(2).uniform(0.1, 2, (B, Z)).astype(np.float32),
}
TANH = Case("tanh_gaussian", "Fading", network("policy_network", 2, 4), {})
WITH_BELIEF = Case("tanh_gaussian", "Fading", network("policy_network", 2 + Z, 4), BELIEF)
Q_VALUES = Case(
    "q_values", "Steering", network("q_network", 2, 3), {"epsilon": np.linspace(0, 0.8, B).astype(np.float32)}
)
UNIFORM = Case("uniform", "Fading", {}, {})
IN_TORCH = [replace(case, policy=TORCH) for case in (TANH, WITH_BELIEF, Q_VALUES)]
CASES = [TANH, WITH_BELIEF, Q_VALUES, UNIFORM, replace(UNIFORM, env="Steering"), *IN_TORCH]
every_actor = pytest.mark.parametrize("case", CASES, ids=str)


def arrays(episodes: EpisodeBatch) -> dict[str, bytes]:
    values = {name: value for name, value in vars(episodes).items() if isinstance(value, np.ndarray)}
    named = {f"{k}.{n}": v for k in ("behavior", "reward_terms") for n, v in getattr(episodes, k).items()}
    return {name: (value.dtype, value.shape, value.tobytes()) for name, value in (values | named).items()}


@every_actor
@pytest.mark.parametrize("shards", [[(0, 2), (2, 6)], [(0, 1), (1, 5), (5, 6)], [(b, b + 1) for b in range(B)]])
def test_bits_do_not_depend_on_how_tasks_are_split(case, shards):
    assert arrays(case.collect(shards)) == arrays(case.collect())


@every_actor
def test_bits_do_not_depend_on_threads_or_on_copies_of_shared_parameters(case, monkeypatch):
    expected = arrays(case.collect())
    assert arrays(case.collect(threads=2)) == expected
    shared = case.params()
    monkeypatch.setattr(Case, "params", lambda self: TaskParams({n: v.copy() for n, v in shared.params.items()}))
    assert arrays(case.collect()) == expected


@pytest.mark.parametrize("case", [TANH, WITH_BELIEF, UNIFORM], ids=str)
def test_a_loop_over_envs_gives_the_bits_of_the_batch(case):
    batched, looped = case.collect(), replace(case, env="Looped").collect()
    assert arrays(replace(looped, initial_state=batched.initial_state)) == arrays(batched)


@every_actor
def test_episodes_are_complete_and_padding_is_zero(case):
    episodes = case.collect()
    assert len(np.unique(episodes.lengths)) > 3
    padding = episodes.mask == 0
    for values in (episodes.actions, episodes.rewards, *episodes.behavior.values()):
        if values.shape[:3] == padding.shape:
            assert not values[padding].any()
            assert values[~padding].any()


@every_actor
def test_tasks_episodes_steps_and_rounds_draw_for_themselves(case):
    first = case.collect()
    for other in (case.collect(iteration=3), case.collect(step=1)):
        assert not np.array_equal(first.actions, other.actions)
    if case.env == "Fading":
        starts = first.actions[:, :, 0].reshape(B * E, -1)
        assert len(np.unique(starts, axis=0)) == B * E


@pytest.mark.parametrize("case", [TANH, WITH_BELIEF, Q_VALUES], ids=str)
def test_deterministic_actions_are_those_of_the_recorded_distribution_and_differ_from_drawn_ones(case):
    drawn, certain = case.collect(), case.collect(deterministic=True)
    real = certain.mask != 0
    if case is Q_VALUES:
        likeliest = certain.behavior["action_values"].argmax(-1)
        np.testing.assert_array_equal(certain.behavior["epsilon"], np.zeros(B))
    else:
        likeliest = np.tanh(certain.behavior["mean"])
    np.testing.assert_array_equal(certain.actions[real], likeliest[real])
    assert arrays(case.collect(deterministic=True)) == arrays(certain)
    # Of Q_VALUES' tasks the first, whose epsilon is 0, draws nothing either.
    assert (drawn.actions != certain.actions).reshape(B, -1).any(axis=1)[1:].all()


def test_a_deterministic_uniform_sampler_is_refused():
    with pytest.raises(ValueError, match="use deterministic=False"):
        UNIFORM.collect(deterministic=True)


def test_a_tanh_gaussian_in_a_wider_box_is_refused(monkeypatch):
    monkeypatch.setattr(Case, "config", EnvConfig(name="actor_envs:Fading"))
    with pytest.raises(ValueError, match=r"set env\.action_scale to 1"):
        TANH.collect()


def test_actions_are_made_of_the_recorded_distribution_and_the_tasks_own_noise():
    episodes = TANH.collect()
    for b in range(B):
        noise = generator(1, "actions", 2, 0, b).standard_normal((T, E, 2), np.float32).swapaxes(0, 1)
        expected = np.tanh(episodes.behavior["mean"][b] + np.exp(episodes.behavior["log_stds"][b]) * noise)
        real = episodes.mask[b] != 0
        np.testing.assert_allclose(episodes.actions[b][real], expected[real], atol=1e-6)


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_episode_acts_by_a_latent_of_its_own_place_in_the_run(deterministic):
    episodes = WITH_BELIEF.collect(deterministic=deterministic)
    latent = episodes.behavior["latent"]
    assert latent.shape == (B, E, Z)
    for b, e in np.ndindex(B, E):
        noise = generator(1, "beliefs", 2, 0, b, e).standard_normal(Z, np.float32)
        expected = BELIEF["belief.mean"][b] + np.sqrt(BELIEF["belief.variance"][b]) * noise
        np.testing.assert_allclose(latent[b, e], expected, rtol=1e-6)
    assert len(np.unique(latent[..., 0])) == B * E


def test_an_episodes_latent_does_not_depend_on_how_many_others_there_are():
    few, many = WITH_BELIEF.collect(E=2), WITH_BELIEF.collect(E=5)
    np.testing.assert_array_equal(few.behavior["latent"], many.behavior["latent"][:, :2])


def test_epsilon_is_recorded_once_per_task():
    np.testing.assert_array_equal(Q_VALUES.collect().behavior["epsilon"], Q_VALUES.own["epsilon"])
