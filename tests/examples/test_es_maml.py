"""ES-MAML, an algorithm with stages of its own, does outside of the package all that one inside does."""

from pathlib import Path

import numpy as np
import pytest

import metaloom
from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.thin import materialise, thin
from metaloom.flows.commands.train import resume, train
from metaloom.flows.operations.evaluate import evaluate
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.run import build_config
from metaloom.storage import Retention

EXAMPLES = Path(__file__).parents[2] / "examples"
SERIAL = Backend(workers=0)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        settings = {"num_tasks": 5, "episodes_per_task": 3, "max_episode_steps": 8, "iterations": 3}
        algorithm = {"name": "es_maml:ESMAML", "inner_steps": 2}
        env, every = {"name": "point-corner", "options": {"reward": "dense"}}, {"every": 3, "test_episodes": 1}
        config = build_config({**settings, "algorithm": algorithm, "env": env, "evaluation": every})
        train(config, tmp_path_factory.mktemp("es") / "run", backend=SERIAL)
        yield storage.open_run(tmp_path_factory.getbasetemp() / "es0" / "run")


def test_it_is_written_in_at_most_90_lines():
    assert len((EXAMPLES / "es_maml.py").read_text().splitlines()) <= 90


def test_opposite_tasks_start_from_opposite_noise_and_the_learner_moves_towards_what_ended_well(run):
    before, started, after = run[1].learner().params, run[1].perturb().params, run[1].update().learner.params
    returns = run[1].rollouts(2).episode_returns.mean(axis=1)
    fitness = (returns - returns.mean()) / returns.std()
    for name, value in before.items():
        noise = (started[name] - value) / 0.1
        np.testing.assert_allclose(noise[1], -noise[0], atol=1e-5)
        np.testing.assert_allclose(noise[3], -noise[2], atol=1e-5)
        step = sum(f * n for f, n in zip(fitness, noise, strict=True)) / len(fitness)
        np.testing.assert_allclose(after[name] - value, 0.05 / 0.1 * step, atol=1e-5)


def digests(path):
    run = storage.open_run(path)
    return {ref: run.record(ref).digest for ref in run.refs()}


def test_it_replays_resumes_forks_and_thins(run, tmp_path):
    assert all(outcome.identical for outcome in replay(run.path))
    fork(run.path, 1, tmp_path / "continued")
    resume(tmp_path / "continued", backend=SERIAL)
    assert digests(tmp_path / "continued") == digests(run.path)
    thin(tmp_path / "continued", Retention(keep_last=1))
    assert materialise(tmp_path / "continued")
    assert storage.verify_run(tmp_path / "continued") == []


def test_it_adapts_after_training_as_in_training_from_the_unperturbed_start(run):
    assert len(evaluate(run.path, backend=SERIAL).summary()) == 3
    policy = metaloom.open_run(run.path).policy(1)
    for name, value in run[1].learner().params.items():
        assert np.array_equal(policy.params[name][0], value)
    # Episodes as the policy collects them: the step is that of training's graph.
    adapted = policy.adapt(run[1].rollouts(0))
    assert adapted.num_tasks == 5
    assert not np.array_equal(adapted.params["log_std"], policy.params["log_std"])


def test_what_its_stage_gives_is_described_in_show_and_in_xarray(run, capsys, monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", str(run.path.parent))
    assert cli.run(["show", "run@1", "--stage", "perturb"]) == 0
    described = "Per-task policy parameters, keyed by name, [B, ...] float32 each."
    assert f"TaskParams: {described}" in capsys.readouterr().out
    data = metaloom.open_run(run.path)[1].xarray(stage="perturb")
    assert data.attrs["description"] == described
    assert {values.dims[0] for values in data.data_vars.values()} == {"task"}


def test_a_package_of_it_is_among_the_recipes(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "es_recipes.py").write_text(
        '"""Recipes."""\nfrom metaloom.pipeline.config.run import RunConfig\n\n\ndef corners():\n'
        '    """Find one of four corners."""\n'
        '    return RunConfig.model_validate({"env": "point-corner", "algorithm": "es_maml:ESMAML"})\n'
    )
    (info := tmp_path / "es_recipes-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: es_recipes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[metaloom.recipes]\nes-maml-corners = es_recipes:corners\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.run(["recipes"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "es-maml-corners" in line]
    assert "broken" not in line
    assert "es-maml-corners" in metaloom.recipes()
