"""Rollouts with networks and policies of the user's own, as the examples have them: the same bits however computed."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.envs.spaces import spaces_of
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies.build import build_policy
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.tasks.samplers import draw_tasks
from metaloom.pipeline.types import EpisodeBatch, TaskBatch, TaskParams
from metaloom.stages import collect_rollouts
from metaloom.stages.collect_rollouts import RolloutPosition, Sampler, play_episodes
from metaloom.stages.rollouts.sampler import RolloutWatch

EXAMPLES = Path(__file__).parents[2] / "examples"
B, E, T = 5, 3, 20


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


@dataclass(frozen=True)
class Case:
    """A policy in an environment, with parameters that differ from task to task."""

    env: EnvConfig
    policy: PolicyConfig

    def __str__(self) -> str:
        return f"{self.policy.name or self.policy.network}-{self.env.name}"

    @property
    def spaces(self) -> Spaces:
        return spaces_of(make_env(self.env))

    def params(self) -> TaskParams:
        policy = build_policy(self.policy, self.spaces)
        each = [policy.initialize(np.random.default_rng(b)) for b in range(B)]
        return TaskParams({name: np.stack([params[name] for params in each]) for name in each[0]})

    def tasks(self) -> TaskBatch:
        return draw_tasks(make_env(self.env), num_tasks=B, run_seed=1, iteration=0)

    def collect(self, shards=((0, B),), *, deterministic: bool = False, E: int = E) -> EpisodeBatch:
        sampler = Sampler(self.env, self.policy, episodes_per_task=E, max_episode_steps=T, deterministic=deterministic)
        position, params, tasks = RolloutPosition(1, 2, 0), self.params(), self.tasks()
        shards = [
            play_episodes(
                sampler, params.slice(*ends), tasks.slice(*ends), position=replace(position, first_task=ends[0])
            )
            for ends in shards
        ]
        return EpisodeBatch.concatenate(shards)


DIRECT = EnvConfig(name="Pendulum-v1", action_scale=1.0)
PIXELS = Case(
    EnvConfig(name="pixels:Catch", action_scale=None),
    PolicyConfig(network="cnn", network_options={"channels": [4, 8]}, hidden_sizes=(16,)),
)
RESIDUAL = Case(
    EnvConfig(name="point-2d"), PolicyConfig(network="own_network:Residual", network_options={"width": 9, "blocks": 2})
)
BETA = Case(DIRECT, PolicyConfig(name="beta_policy:BetaPolicy", hidden_sizes=(9,)))
every_case = pytest.mark.parametrize("case", [PIXELS, RESIDUAL, BETA], ids=str)


def arrays(episodes: EpisodeBatch) -> dict[str, tuple]:
    values = {name: value for name, value in vars(episodes).items() if isinstance(value, np.ndarray)}
    named = {f"{k}.{n}": v for k in ("behavior", "reward_terms") for n, v in getattr(episodes, k).items()}
    return {name: (value.dtype, value.shape, value.tobytes()) for name, value in (values | named).items()}


def test_an_actor_is_built_while_no_environment_is_watched(monkeypatch):
    noted = []

    class Noting(RolloutWatch):
        def idle(self):
            noted.append("idle")

        def entered(self, env_step):
            noted.append("entered")

        def left(self):
            noted.append("left")

    made = collect_rollouts.make_actor
    monkeypatch.setattr(collect_rollouts, "make_actor", lambda *args: noted.append("built") or made(*args))
    sampler = Sampler(RESIDUAL.env, RESIDUAL.policy, episodes_per_task=1, max_episode_steps=2)
    play_episodes(sampler, RESIDUAL.params(), RESIDUAL.tasks(), position=RolloutPosition(1, 2, 0), watch=Noting())
    assert noted == ["idle", "built", *["entered", "left"] * 3]


@every_case
@pytest.mark.parametrize("shards", [[(0, 2), (2, 5)], [(b, b + 1) for b in range(B)]])
def test_bits_do_not_depend_on_how_tasks_are_split(case, shards):
    assert arrays(case.collect(shards)) == arrays(case.collect())


@every_case
def test_what_is_recorded_is_the_policys_distribution_at_the_observations(case):
    episodes, params = case.collect(), case.params().params
    policy = build_policy(case.policy, case.spaces)
    for b in range(B):
        own = {name: torch.tensor(value[b]) for name, value in params.items()}
        real = episodes.mask[b] != 0
        distribution = policy.distribution(own, torch.tensor(episodes.observations[b, :, :-1][real]))
        behavior = {
            name: torch.tensor(value[b][real] if value.ndim == 4 else value[b, None])
            for name, value in episodes.behavior.items()
        }
        actions = torch.tensor(episodes.actions[b][real])
        recorded = policy.recorded(behavior)
        np.testing.assert_allclose(recorded.log_prob(actions), distribution.log_prob(actions), atol=1e-4)
        np.testing.assert_allclose(recorded.kl(distribution), 0, atol=1e-5)


@every_case
def test_deterministic_actions_do_not_depend_on_how_many_episodes_there_are_and_differ_from_drawn_ones(case):
    certain, fewer, drawn = case.collect(deterministic=True), case.collect(deterministic=True, E=2), case.collect()
    assert np.array_equal(certain.actions[:, :2], fewer.actions)
    assert not np.array_equal(certain.actions, drawn.actions)


def test_observations_of_pixels_are_stored_as_they_are_and_scaled_by_their_largest_value():
    episodes, spaces = PIXELS.collect(), PIXELS.spaces
    assert (spaces.observation_shape, spaces.observation_scale, spaces.num_actions) == ((16, 16, 1), 255.0, 3)
    assert episodes.observations.shape == (B, E, T + 1, 256)
    assert set(np.unique(episodes.observations)) == {0, 128, 255}


def test_beta_actions_stay_in_their_box_and_are_drawn_anew_for_every_task_step_and_episode():
    episodes = BETA.collect()
    assert np.abs(episodes.actions).max() < 1
    assert len(np.unique(episodes.actions)) == episodes.actions.size
    assert episodes.behavior.keys() == {"alpha", "beta"}


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (PolicyConfig(), ConfigError, r"policy.network is mlp, but observations are images .*policy.network=cnn"),
        (PolicyConfig(network="own_network:Residual"), ConfigError, r"Residual\(\(16, 16, 1\), 3\) raised ValueError"),
        (PolicyConfig(name="beta_policy:Gamma"), ConfigError, "policy.name: got 'beta_policy:Gamma'"),
    ],
)
def test_what_does_not_fit_pixels_is_refused_by_learners_and_by_workers(policy, error, message):
    with pytest.raises(error, match=message):
        build_policy(policy, PIXELS.spaces)
    sampler = Sampler(PIXELS.env, policy, episodes_per_task=2, max_episode_steps=3)
    with pytest.raises(error, match=message):
        play_episodes(sampler, PIXELS.params(), PIXELS.tasks(), position=RolloutPosition(1, 0, 0))


def test_options_of_a_gaussian_are_refused_where_actions_are_discrete():
    with pytest.raises(ConfigError, match=r"policy: .*init_std.* but the environment has 3 discrete actions"):
        build_policy(PIXELS.policy.model_copy(update={"init_std": 0.5}), PIXELS.spaces)


def test_a_bare_name_stands_for_the_policys_name():
    assert PolicyConfig.model_validate("beta_policy:BetaPolicy") == PolicyConfig(name="beta_policy:BetaPolicy")


@pytest.mark.parametrize("field", ["name", "network"])
def test_a_name_that_nothing_has_is_refused_with_the_settings(field):
    with pytest.raises(ValueError, match=r"got 'betta'; expected .*module:Class for a (policy|network), or a name"):
        PolicyConfig.model_validate({field: "betta"})
