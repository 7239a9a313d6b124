"""A user's own numbers in a run: metrics, diagnostics of its environment, and its baselines' parameters."""

import sys
from pathlib import Path

import numpy as np
import pytest

import metaloom
from metaloom import storage
from metaloom.flows.cli import run as command
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import train
from metaloom.flows.errors import UsageError
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.schema import ConfigError

HERE = Backend(workers=0)
SIZES = {"iterations": 1, "num_tasks": 2, "episodes_per_task": 2, "max_episode_steps": 6}
OWN = """
import numpy as np
from metaloom.pipeline.baselines.config import BaselineSettings
from metaloom.pipeline.types import EpisodeBatch, Step

def lengths(episodes: EpisodeBatch) -> dict[str, float]:
    return {"longest": float(episodes.lengths.max())}

def spread(step: Step) -> dict[str, float]:
    return {"spread": float(step.samples.advantages.std())}

def clash(episodes: EpisodeBatch) -> dict[str, float]:
    return dict.fromkeys(["std_return", "min_return", "average_return", "max_return"], 0.0)

def numbered(episodes: EpisodeBatch) -> dict[int, float]:
    return {1: 0.0}

def bare(episodes):
    return {}

def misspelled(episodes: "EpisodeBath"):
    return {}

def ratio(episodes: EpisodeBatch) -> dict[str, float]:
    return {"ratio": float("nan")}

class Mean(BaselineSettings):
    share: float = 1.0

    def fit_predict(self, observations, targets, mask, *, seed=0, parallel=map):
        return self.share * targets.mean(1, keepdims=True) * mask

    def fit(self, observations, targets, mask, *, seed=0, parallel=map):
        return {"mean": self.share * targets.mean(1)}

class Drawn(BaselineSettings):
    def fit_predict(self, observations, targets, mask, *, seed=0, parallel=map):
        return self.fit(observations, targets, mask, seed=seed)["drawn"][:, None] * mask

    def fit(self, observations, targets, mask, *, seed=0, parallel=map):
        return {"drawn": np.random.default_rng(seed).random(targets[:, 0].shape)}
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    (tmp_path / "own_numbers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("own_numbers", None)


def trained(path="run", **changes) -> storage.Run:
    config = build_config({"env": "half-cheetah-dir", "algorithm": "promp", **SIZES, **changes})
    train(config, Path(path), backend=HERE)
    return storage.open_run(path)


def test_metrics_of_ones_own_are_stored_and_replayed():
    run = trained(
        env={"name": "half-cheetah-dir", "diagnostics": True},
        metrics=["own_numbers:lengths", "own_numbers:spread"],
    )
    (row,) = run.metrics().to_pandas().to_dict("records")
    assert (row["step_0.longest"], row["step_1.longest"]) == (6, 6)
    assert row["step_1.spread"] == pytest.approx(run[0].samples(1).advantages.std())
    assert row["step_0.forward_velocity"] == pytest.approx(run[0].rollouts(0).observations[:, :, 1:, 8].mean())
    assert all(outcome.identical for outcome in replay(run.path))
    assert {*run.info["environment"]["plugins"]} == {"own_numbers:lengths", "own_numbers:spread"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"metrics": ["own_numbers:clash"]},
            r"average_return, step_0\.max_return, step_0\.min_return, step_0\.std_return; ret",
        ),
        ({"metrics": ["own_numbers:numbered"]}, r"returned \{1: 0\.0\}; expected a mapping from names to floats"),
        ({"metrics": ["own_numbers:nothing"]}, "no attribute 'nothing'"),
        ({"metrics": ["own_numbers:bare"]}, "the parameter of 'own_numbers:bare' is annotated None; use"),
        ({"metrics": ["own_numbers:misspelled"]}, "are invalid .name 'EpisodeBath' is not defined.; use"),
        ({"metrics": ["own_numbers:Mean"]}, "'own_numbers:Mean' has type ModelMetaclass; use"),
        (
            {"metrics": ["own_numbers:spread"], "env": "Pendulum-v1", "algorithm": {"name": "sac"}, "num_tasks": 1},
            "own_numbers:spread take a Step, but sac has no samples; use functions that take an Episode",
        ),
    ],
)
def test_metrics_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        trained(**changes)
    assert not Path("run").exists()


def test_a_number_that_is_not_finite_is_stored_and_warned_of_once_in_every_run(caplog):
    for name in ("one", "other"):
        caplog.clear()
        rows = trained(name, metrics=["own_numbers:ratio"], iterations=2).metrics().to_pandas()
        assert np.isnan(rows["step_0.ratio"]).all()
        (told,) = [record.getMessage() for record in caplog.records if "step_0.ratio" in record.getMessage()]
        assert told == "metrics: step_0.ratio is nan, not a finite number; it is stored unchanged"


@pytest.mark.parametrize("step", [0, 1])
def test_the_parameters_of_a_baseline_are_fitted_again_from_stored_episodes(step, capsys, monkeypatch):
    run = trained()
    fitted = metaloom.fitted_baselines(run, 0, step)["baseline"]
    observations = np.clip(run[0].rollouts(step).observations[:, :, :-1], -10, 10)
    tau = np.broadcast_to(np.arange(6)[:, None] / 100, (2, 2, 6, 1))
    features = [("observation", observations), ("observation_squared", observations**2)]
    features += [("time", np.concatenate([tau, tau**2, tau**3], -1)), ("constant", np.ones_like(tau))]
    values = sum(np.einsum("betf,bf->bet", feature, fitted[name]) for name, feature in features)
    np.testing.assert_allclose(values, run[0].samples(step).values, rtol=1e-3, atol=1e-3)
    assert command(["show", f"{run.path.resolve()}@0", "--stage", "process_samples", "--step", str(step)]) == 0
    assert "observation_squared" in capsys.readouterr().out
    monkeypatch.setattr("metaloom.flows.commands.optimize.baseline_parameters", lambda *_, **__: {"baseline": {}})
    with pytest.raises(UsageError, match=r"^run: the run's baseline, linear.*, has no parameters$"):
        metaloom.fitted_baselines(run, 0, step)


def test_a_baseline_of_ones_own_is_trained_with_and_tells_its_parameters():
    run = trained(baseline={"name": "own_numbers:Mean", "share": 0.5})
    fitted = metaloom.fitted_baselines(run, 0)["baseline"]["mean"]
    np.testing.assert_allclose(run[0].samples(0).values[:, 0], fitted, rtol=1e-5)
    assert all(outcome.identical for outcome in replay(run.path))


def test_a_baseline_that_draws_is_fitted_again_with_the_draws_of_its_round():
    run = trained(baseline={"name": "own_numbers:Drawn"}, iterations=2)
    for iteration, step in ((0, 0), (0, 1), (1, 1)):
        fitted = metaloom.fitted_baselines(run, iteration, step)["baseline"]["drawn"]
        np.testing.assert_allclose(run[iteration].samples(step).values[:, 0], fitted, rtol=1e-5)
