"""Networks and policies of the user's own in whole runs, as the examples have them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from distributed import LocalCluster

import metaloom
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import resume, train
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import RunConfig, build_config
from metaloom.pipeline.schema import ConfigError

pytestmark = pytest.mark.usefixtures("warm")

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
    "pixels-off-policy": (
        "dql",
        "env=pixels:Catch",
        "policy.network=cnn",
        "algorithm.num_init_memory_steps=300",
        "algorithm.memory_size=1000",
    ),
    "adapting-to-pixels": (
        "promp-point-corner",
        "env=pixels:Catch",
        "policy.network=cnn",
        "policy.hidden_sizes=[16]",
        "baseline=linear_time",
        "num_tasks=2",
        "episodes_per_task=2",
    ),
    "linear": ("ppo", "env=Pendulum-v1", "policy.hidden_sizes=[]", "algorithm.critic_hidden_sizes=[]", "min_steps=100"),
    "remembering-pixels": (
        "rl2",
        "env=pixels:Catch",
        "policy.encoder=cnn",
        "policy.encoder.size=16",
        "policy.hidden_sizes=[12]",
        "algorithm.episodes_per_trial=2",
        "num_tasks=3",
        "episodes_per_task=4",
    ),
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


def test_a_trained_policy_with_distributions_of_its_own_adapts_as_the_run_did(tmp_path):
    few = ("env.options.reward=dense", "num_tasks=2", "episodes_per_task=2")
    train(config_of(("maml-ppo-point-corner", "policy=beta_policy:BetaPolicy", *few)), tmp_path / "run", backend=HERE)
    run = metaloom.open_run(tmp_path / "run")
    policy, batch, stored = run.policy(1), run[1].rollouts(0), run[1].adapted(0).params
    adapted = policy.adapt(batch).params
    assert all(np.array_equal(adapted[name], stored[name]) for name in stored)
    with pytest.raises(ValueError, match=r"the episodes record alpha of .*; expected alpha, beta, which"):
        policy.adapt(replace(batch, behavior={"alpha": batch.behavior["alpha"]}))


@pytest.mark.dask
@pytest.mark.slow
def test_a_worker_gives_the_digests_of_this_process(tmp_path, digests):
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        there = Backend(scheduler=cluster.scheduler_address)
        for name in ("module", "pixels-off-policy", "remembering-pixels"):
            train(config_of(RUNS[name]), tmp_path / name / "here", backend=HERE)
            train(config_of(RUNS[name]), tmp_path / name / "there", backend=there)
            assert digests(tmp_path / name / "there") == digests(tmp_path / name / "here"), name


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (("sac", "env=Pendulum-v1", "policy=beta_policy:BetaPolicy"), "policy.name is .* its own distributions"),
        (("ppo", "env=pixels:Catch"), r"policy.network is mlp, but observations are images .*policy.network=cnn"),
        (("ppo", "env=pixels:Catch", "policy.network=residual"), "use policy.network=cnn"),
        (
            ("promp-point-corner", "env=pixels:Catch", "policy.network=cnn"),
            r"baseline is linear_feature, but observations are images .* 256 bytes .* Use baseline=linear_time",
        ),
        (("ppo", "env=Pendulum-v1", "policy.network=cnn"), r"observations have the shape \(3,\); expected images"),
        (("ppo", "env=Pendulum-v1", "policy.network=own_network:Nothing"), "own_network:Nothing"),
        (
            ("rl2", "env=pixels:Catch"),
            r"policy.network is gru, but observations are images .*policy.encoder=cnn or mod",
        ),
        (
            ("rl2", "env=pixels:Catch", "policy.encoder=mlp"),
            r"policy.encoder is mlp, but .* use policy.encoder=cnn",
        ),
        (("rl2-bandit", "policy.encoder=cnn"), r"policy.encoder is cnn, but observations have the shape \(1,\)"),
        (("rl2-bandit", "policy.encoder=gru"), "policy.encoder: got gru; expected cnn, mlp, or module:Class"),
        (
            ("ppo", "env=pixels:Catch", "policy.network=cnn", "policy.encoder=cnn"),
            "policy.encoder is cnn, but ppo has no memory; remove it",
        ),
        (
            ("varibad", "env=pixels:Catch", "policy.network=cnn"),
            "images .* from which tasks cannot be inferred",
        ),
        (
            ("sac", "env=Pendulum-v1", "policy.network=own_network:Residual", "policy.hidden_sizes=[8]"),
            r"policy.hidden_sizes is \(8,\) but the network is own_network:Residual, .*remove it",
        ),
        (
            ("ppo", "env=Pendulum-v1", "policy.network=own_network:Residual", "algorithm.critic_hidden_sizes=[8]"),
            r"algorithm.critic_hidden_sizes is \(8,\) but the network is own_network:Residual",
        ),
        (("promp-point-corner", "algorithm.optimizer=LBFGS"), "required positional argument: 'closure'"),
        (("ppo", "env=CartPole-v1", "algorithm.optimizer=adamw"), "did you mean AdamW"),
        (("promp-point-corner", "algorithm.kernel=fused"), "promp has no fused kernel .*use auto or torch"),
        (("promp-point-corner", "env.diagnostics=true"), "env.diagnostics is on, but point-corner has none"),
        (("sac", "env=Pendulum-v1", "env.diagnostics=true"), "env.diagnostics is on, but Pendulum-v1 has none"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_stored(run, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        train(config_of(run), tmp_path / "run", backend=HERE)
    assert not (tmp_path / "run").exists()
