"""Networks and policies of the user's own in whole runs, as the examples have them."""

from pathlib import Path

import pytest

from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import resume, train
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import RunConfig, build_config

EXAMPLES = Path(__file__).parents[2] / "examples"
HERE = Backend(workers=0)
RUNS = {
    "module": (
        "promp-point-corner",
        "policy.network=own_network:Residual",
        "policy.network_options.blocks=2",
        "num_tasks=4",
        "episodes_per_task=3",
    ),
    "pixels": ("ppo", "env=pixels:Catch", "policy.network=cnn", "policy.hidden_sizes=[16]", "episodes_per_task=8"),
    "beta": ("ppo", "env=Pendulum-v1", "env.action_scale=1", "policy=beta_policy:BetaPolicy", "min_steps=100"),
}
of_every_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(EXAMPLES)


def config_of(run: tuple[str, ...]) -> RunConfig:
    recipe, *settings = run
    return build_config(override(load_settings(recipe), [*settings, "max_episode_steps=15", "iterations=2"]))


@of_every_run
def test_a_run_trains_resumes_and_replays(run, tmp_path):
    train(config_of(run), tmp_path / "run", backend=HERE)
    resume(tmp_path / "run", iterations=3, backend=HERE)
    replayed = list(replay(tmp_path / "run", 2, backend=HERE))
    assert len(replayed) > 3
    assert all(stage.identical for stage in replayed)


@pytest.mark.dask
@pytest.mark.slow
@of_every_run
def test_two_workers_give_the_digests_of_this_process(run, tmp_path, digests):
    train(config_of(run), tmp_path / "here", backend=HERE)
    train(config_of(run), tmp_path / "there", backend=Backend(workers=2))
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
