"""Numbers that a run keeps of every round because its environment or its user asks for them."""

import sys

import numpy as np
import pytest

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.estimation.diagnostics import Measures, names_of_metrics, with_own
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import EpisodeBatch, Samples, Step

SPACES = Spaces((3,), 1.0, 2, 0)
OWN = """
from metaloom.pipeline.types import EpisodeBatch, Step

def last_reward(episodes: EpisodeBatch) -> dict[str, float]:
    return {"last_reward": episodes.rewards[:, :, -1].mean()}

def spread(step: Step) -> dict[str, float]:
    return {"spread": step.samples.advantages.std() + step.k}

def bare(episodes):
    return {}

def wordy(episodes: EpisodeBatch):
    return {"a": "many"}

def listed(episodes: EpisodeBatch):
    return [1.0]

def numbered(episodes: EpisodeBatch):
    return {1: 2.0}

def unknown(episodes: "Episodes"):
    return {}

def failing(episodes: EpisodeBatch):
    return {"a": 1 / 0}

def taken(episodes: EpisodeBatch):
    return {"average_return": 1.0, "mine": 2.0}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_metrics.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_metrics", None)


def episodes(num_tasks=2, O=17, T=3):
    rng = np.random.default_rng(num_tasks)
    rewards = rng.normal(size=(num_tasks, 2, T)).astype(np.float32)
    return EpisodeBatch(
        observations=rng.normal(size=(num_tasks, 2, T + 1, O)).astype(np.float32),
        actions=np.zeros((num_tasks, 2, T, 1), np.float32),
        rewards=rewards,
        terminated=np.zeros((num_tasks, 2), bool),
        truncated=np.ones((num_tasks, 2), bool),
        lengths=np.full((num_tasks, 2), T, np.int32),
        behavior={},
        reward_terms={"reward": rewards},
        initial_state=np.zeros((num_tasks, 2, 0)),
    )


@pytest.mark.usefixtures("own")
def test_functions_of_ones_own_become_metrics_of_their_round():
    measures = Measures.named(["own_metrics:last_reward", "own_metrics:spread"])
    batch = episodes()
    samples = Samples(*[np.ones(batch.rewards.shape, np.float32)] * 4)
    found = measures.of_step(Step(batch, samples, 1))
    assert found == {"step_1.last_reward": pytest.approx(batch.rewards[:, :, -1].mean()), "step_1.spread": 1.0}


@pytest.mark.usefixtures("own")
def test_several_batches_of_a_round_are_averaged_over_their_episodes():
    measures = Measures.named(["own_metrics:last_reward"])
    rounds = [episodes(1), episodes(3)]
    last = np.concatenate([batch.rewards[:, :, -1].ravel() for batch in rounds])
    assert measures.of_round(rounds, 0) == {"step_0.last_reward": pytest.approx(last.mean())}


def test_half_cheetah_tells_how_fast_it_ran():
    env = make_env(EnvConfig(name="half-cheetah-dir", diagnostics=True))
    batch = episodes()
    measures = Measures.named([], diagnostics=env.diagnostics)
    velocity = batch.observations[:, :, 1:, 8].mean(dtype=np.float64)
    assert measures.of_round([batch], 2) == {"step_2.forward_velocity": pytest.approx(velocity)}
    assert make_env(EnvConfig(name="point-corner")).diagnostics(batch) == {}


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "own_metrics:bare",
            "the parameter of 'own_metrics:bare' is annotated None; use a function of one EpisodeBatch or Step",
        ),
        (
            "own_metrics:unknown",
            "annotations of 'own_metrics:unknown' are invalid .name 'Episodes' is not defined.; use a function",
        ),
        ("own_metrics:EpisodeBatch", "has type type; use a function"),
        ("os:system", "has type builtin_function_or_method; use a function"),
        ("subprocess:call", "use a function of one EpisodeBatch or Step"),
        ("own_metrics:nothing", "no attribute 'nothing'"),
        ("nothing", "got 'nothing'"),
    ],
)
def test_what_is_no_function_of_episodes_is_refused_before_it_is_called(name, message):
    with pytest.raises(ConfigError, match=f"metrics: .*{message}"):
        Measures.named([name])


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(("name", "found"), [("listed", r"\[1.0\]"), ("numbered", "{1: 2.0}")])
def test_a_function_that_returns_no_mapping_from_names_is_refused_before_and_in_a_run(name, found):
    measures = Measures.named([f"own_metrics:{name}"])
    message = f"metrics: own_metrics:{name} returned {found}; expected a mapping from names to floats"
    with pytest.raises(ConfigError, match=message):
        measures.of_round([episodes()], 0)
    with pytest.raises(ConfigError, match=message):
        names_of_metrics(measures, SPACES, {}, processed=True)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("processed", [False, True])
def test_the_names_of_metrics_are_known_before_a_run_unless_a_function_fails(processed):
    def names(*functions):
        measures = Measures.named([f"own_metrics:{name}" for name in functions])
        return names_of_metrics(measures, SPACES, {}, processed=processed)

    found = names("last_reward")
    assert found is not None
    assert {"last_reward", "average_return"} <= found
    assert ("explained_variance" in found) == processed
    assert names("failing") is None
    with pytest.raises(ConfigError, match=r"metrics: every run already has step_\d.average_return"):
        names("taken")
    assert with_own({"a": 1.0}, {"b": 2.0}) == {"a": 1.0, "b": 2.0}


@pytest.mark.usefixtures("own")
def test_a_function_that_returns_no_numbers_is_refused():
    with pytest.raises(
        ConfigError, match=r"own_metrics:wordy returned {'a': 'many'}: .*expected a mapping from names to floats"
    ):
        Measures.named(["own_metrics:wordy"]).of_round([episodes()], 0)
