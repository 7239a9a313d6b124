"""A2C, PPO, PPO2 and SVPG through the store: the same bits however a run came about, and what goes with it."""

import shutil

import numpy as np
import pytest

from metaloom import storage
from metaloom.flows.commands.optimize import optimize
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import config_of, resume, train
from metaloom.flows.errors import UsageError
from metaloom.flows.graph.warm_start import pinned
from metaloom.flows.operations.evaluate import evaluate
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.runs import RunAt, best_iteration
from metaloom.flows.views.run_info import run_info
from metaloom.pipeline.building import setup_of
from metaloom.pipeline.config.input import ConfigError, override
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.policies.inference import log_softmax
from metaloom.storage.format.stages import ON_POLICY

pytestmark = pytest.mark.usefixtures("warm")

HERE = Backend(workers=0)
TINY = [
    "env=CartPole-v1",
    "iterations=3",
    "min_steps=60",
    "episodes_per_task=12",
    "max_episode_steps=20",
    "policy.hidden_sizes=[8]",
]


def tiny(recipe, *changes):
    return build_config(override(load_settings(recipe), [*TINY, *changes]))


@pytest.mark.parametrize(
    ("recipe", "env", "changes"),
    [
        ("a2c", "CartPole-v1", []),
        ("ppo", "CartPole-v1", []),
        ("ppo2", "Pendulum-v1", []),
        ("svpg", "CartPole-v1", []),
        ("ppo", "Acrobot-v1", []),
        (
            "ppo2",
            "Pendulum-v1",
            ["algorithm.kernel=torch", "algorithm.lr_schedule={name: ExponentialLR, options: {gamma: 0.5}}"],
        ),
        ("svpg", "CartPole-v1", ["algorithm.particle={name: ppo, optimizer: AdamW, critic_network: residual}"]),
    ],
)
def test_a_run_is_replayed_resumed_and_verified_bit_for_bit(tmp_path, digests, recipe, env, changes):
    path, halves = tmp_path / "whole", tmp_path / "halves"
    config = tiny(recipe, f"env={env}", *changes)
    train(config, path, backend=HERE)
    train(config.model_copy(update={"iterations": 2}), halves, backend=HERE)
    resume(halves, iterations=3, backend=HERE)
    assert digests(path) == digests(halves)
    assert all(outcome.identical for outcome in replay(path))
    assert storage.verify_run(path) == []
    run = storage.open_run(path)
    inputs = {
        (ref.stage, ref.iteration) for ref in (i.ref for i in run.record(storage.StageRef(1, "process_samples")).inputs)
    }
    assert inputs == {("meta_optimize", 0), ("collect_rollouts", 1)}  # the critic is in the learner


@pytest.mark.dask
def test_workers_change_no_bit(tmp_path, digests):
    config = tiny("svpg", "algorithm.num_particles=3")
    train(config, tmp_path / "here", backend=HERE)
    train(config, tmp_path / "there", backend=Backend(workers=2))
    assert digests(tmp_path / "here") == digests(tmp_path / "there")


def test_places_without_an_episode_are_in_no_table_and_no_metric(tmp_path):
    train(tiny("a2c"), tmp_path / "run", backend=HERE)
    run = storage.open_run(tmp_path / "run")
    episodes = run.episodes().to_pandas()
    assert (episodes["length"] > 0).all()
    assert len(run.steps().to_pandas()) == episodes["length"].sum()
    metrics = run[2].metrics()
    rollouts = run[2].rollouts(0)
    assert metrics["step_0.num_episodes"] == rollouts.real.sum() < rollouts.real.size
    assert metrics["step_0.average_return"] == pytest.approx(rollouts.episode_returns[rollouts.real].mean())
    assert metrics["env_steps"] == episodes["length"].sum() >= 3 * 60
    assert metrics["env_steps_nominal"] == 20 * len(episodes)


def test_a_policy_is_evaluated_as_it_is(tmp_path):
    train(tiny("svpg"), tmp_path / "run", backend=HERE)
    evaluation = evaluate(tmp_path / "run", num_tasks=5, backend=HERE)  # of four particles
    assert [summary.adaptation_steps for summary in evaluation.summary()] == [0]
    assert len(evaluation.tasks) == 5
    with pytest.raises(ConfigError, match=r"evaluation.adaptation_steps is 1 but svpg does not adapt"):
        evaluate(tmp_path / "run", adaptation_steps=1, backend=HERE)


def test_a_horizon_starts_particles_afresh_in_the_iteration_behind_it(tmp_path):
    train(tiny("svpg", "algorithm.num_particles=2", "algorithm.horizon=1"), tmp_path / "run", backend=HERE)
    run = storage.open_run(tmp_path / "run")
    name = "logits_network.hidden_0.kernel"
    learners = [run.load(ON_POLICY.learner_ref(updates)).learner.params[name] for updates in range(4)]
    config = config_of(run)
    svpg = config.algorithm.build(setup_of(config, make_env(config.env)))
    for iteration in (1, 2):
        before = run.load(ON_POLICY.learner_ref(iteration)).learner
        afresh = svpg.at_start(before, run_seed=config.seed).params[name]
        # An update is a short step from where its iteration began.
        assert np.abs(learners[iteration + 1] - afresh).max() < 0.2 < np.abs(afresh - learners[iteration]).max()
        log_probs = run[iteration].rollouts(0).behavior["log_probs"][0, 0, 0]
        observation = run[iteration].rollouts(0).observations[0, 0, :1]
        acting = {key: value[0] for key, value in svpg.at_start(before, run_seed=1).params.items()}
        hidden = np.tanh(observation @ acting[name] + acting["logits_network.hidden_0.bias"])
        logits = hidden @ acting["logits_network.output.kernel"] + acting["logits_network.output.bias"]
        np.testing.assert_allclose(log_probs, log_softmax(logits)[0], rtol=1e-5)
    assert all(outcome.identical for outcome in replay(tmp_path / "run"))
    again = optimize(tmp_path / "run", 1)
    assert again.changed.identical
    assert again.quantities()["step_length"][0] < 0.5  # from the particles that acted


def test_a_warm_start_has_the_parameters_of_the_other_run_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    train(tiny("ppo"), tmp_path / "first", backend=HERE)
    train(tiny("ppo", "init_from=first@2", "seed=5"), tmp_path / "second", backend=HERE)
    first, second = storage.open_run(tmp_path / "first"), storage.open_run(tmp_path / "second")
    source, start = first[1].update().learner, second[0].learner()
    for name, value in source.params.items():
        np.testing.assert_array_equal(start.params[name], value)
    np.testing.assert_array_equal(start.extra["critic.output.kernel"], source.extra["critic.output.kernel"])
    assert not start.optimizer["policy.second_moment"].any()
    assert int(start.extra["num_updates"]) == int(start.extra["env_steps"]) == 0
    pin = config_of(second).init_from
    assert (pin.updates, pin.digest) == (2, first.record(ON_POLICY.learner_ref(2)).digest)
    assert all(outcome.identical for outcome in replay(tmp_path / "second", 0))


def test_a_warm_start_may_be_from_the_best_policy_or_the_latest(tmp_path, monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    train(tiny("a2c"), tmp_path / "first", backend=HERE)
    best = best_iteration(storage.open_run(tmp_path / "first"))
    for name, updates in (("best", best), ("latest", 3)):
        start = pinned(tiny("a2c", f"init_from=first@{name}")).init_from
        assert (start.run, start.updates) == (str(tmp_path / "first"), updates)


def test_a_warm_start_with_the_activation_that_the_other_run_had_by_default_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    train(tiny("ppo", "iterations=1"), tmp_path / "first", backend=HERE)
    assert pinned(tiny("ppo", "policy.activation=tanh", "init_from=first")).init_from.updates == 1
    stored = {**storage.open_run(tmp_path / "first").config}
    del stored["processing"]  # as in runs of the first versions, which scaled no rewards
    monkeypatch.setattr(storage.Run, "config_of", lambda run, ref: stored)
    assert pinned(tiny("ppo", "policy.activation=tanh", "init_from=first")).init_from.updates == 1


def test_iterations_behind_the_horizon_of_step_sizes_are_warned_of_with_the_cure(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    falling = ["algorithm.lr_schedule=linear", "algorithm.lr_horizon=2"]
    train(tiny("ppo", "iterations=2", *falling), tmp_path / "run", backend=HERE)
    assert caplog.messages == []
    resume(tmp_path / "run", iterations=4, backend=HERE)
    (told,) = caplog.messages
    assert "from iteration 2 on, so nothing is learned in 2 of 4 iterations" in told
    assert f"`metaloom fork {tmp_path / 'run'}@2 --run NEW --set algorithm.lr_horizon=4`" in told
    run = storage.open_run(tmp_path / "run")
    start, end = run[1].update().learner.params, run[3].update().learner.params
    assert all(np.array_equal(start[name], end[name]) for name in start)
    caplog.clear()
    train(tiny("ppo", "iterations=3", *falling), tmp_path / "other", backend=HERE)
    assert "so nothing is learned in 1 of 3 iterations; algorithm.lr_horizon=3 lets all" in caplog.messages[0]


def test_a_warm_start_whose_learner_changed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    train(tiny("ppo"), tmp_path / "first", backend=HERE)
    train(tiny("ppo", "init_from=first"), tmp_path / "second", backend=HERE)
    shutil.rmtree(tmp_path / "first")
    train(tiny("ppo", "seed=9"), tmp_path / "first", backend=HERE)
    with pytest.raises(UsageError, match=r"has the digest .*; expected .*, its digest when the run was started"):
        list(replay(tmp_path / "second", 0, stage="initialize"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            ["policy.hidden_sizes=[9]", "init_from=first"],
            ConfigError,
            r"policy parameter logits_network.* expected \(9,\)",
        ),
        (["algorithm.critic_hidden_sizes=[9]", "init_from=first"], ConfigError, "critic parameter critic"),
        (
            ["policy.activation=relu", "init_from=first"],
            ConfigError,
            r"init_from: policy.activation is relu here and tanh in .*first@3, .*; use tanh",
        ),
        (
            ["policy.output_activation=tanh", "init_from=first"],
            ConfigError,
            "policy.output_activation is tanh here and identity in",
        ),
        (["policy.network=residual", "init_from=first"], ConfigError, "policy.network is residual here and mlp in"),
        (["init_from=first@9"], UsageError, r"learner .*first@9 does not exist; the run has completed only 3 updates"),
        (["init_from=nowhere"], storage.StoreError, "nowhere"),
    ],
)
def test_a_warm_start_that_does_not_fit_is_refused(tmp_path, monkeypatch, changes, error, message):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    train(tiny("ppo"), tmp_path / "first", backend=HERE)
    with pytest.raises(error, match=message):
        train(tiny("ppo", *changes), tmp_path / "second", backend=HERE)


def test_a_criterion_ends_a_run_and_a_resumed_one_at_the_same_iteration(tmp_path, digests):
    config = tiny("a2c", "iterations=9", "stop.samples=130")
    assert train(config, tmp_path / "run", backend=HERE).iterations_done == 2
    run = storage.open_run(tmp_path / "run")
    assert run[0].metrics()["env_steps"] < 130 <= run[1].metrics()["env_steps"]
    assert run_info(run)["state"] == "complete"
    before = digests(tmp_path / "run")
    assert resume(tmp_path / "run", backend=HERE).iterations_done == 2
    assert digests(tmp_path / "run") == before
    assert config.digest() == tiny("a2c", "iterations=9").digest()  # where a run ends is not what it computes


def test_best_is_the_first_iteration_with_the_highest_return_and_latest_the_newest(tmp_path, monkeypatch):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    train(tiny("a2c"), tmp_path / "run", backend=HERE)
    run = storage.open_run(tmp_path / "run")
    returns = [run[i].metrics()["step_0.average_return"] for i in range(3)]
    assert best_iteration(run) == RunAt.parse("run@best").iteration == int(np.argmax(returns))
    with monkeypatch.context() as patch:
        patch.setattr("metaloom.flows.runs.last_return", lambda names: None)
        with pytest.raises(UsageError, match=r"run: the metrics contain no returns; pass an iteration number$"):
            best_iteration(run)
    for name, iteration, updates in (("latest", 2, 3), ("-1", 2, 3), ("-3", 0, 1)):
        assert RunAt.parse(f"run@{name}").iteration == iteration
        assert RunAt.parse(f"run@{name}", learner=True).iteration == updates
    for name, learner in (("-4", False), ("-5", True)):
        with pytest.raises(UsageError, match=r"expected at least 4|choose one from -4 to 3"):
            RunAt.parse(f"run@{name}", learner=learner)
    with pytest.raises(UsageError, match="an iteration, `best` or `latest`"):
        RunAt.parse("run@last")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["baseline=linear_time"], "baseline is linear_time but a2c has a critic"),
        (["min_rollouts=13"], "min_rollouts is 13 but episodes_per_task.* is 12"),
        (
            ["algorithm.critic_network=residual", "algorithm.critic_hidden_sizes=[3,4]"],
            "critic's network.* must be equal",
        ),
        (["algorithm.critic_activation=tan"], "critic's network: got 'tan'"),
        (
            ["algorithm.critic_network_options.channels=[3]"],
            "critic_network_options is .* but critic_network is not set",
        ),
        (["algorithm.inner_steps=1"], "inner_steps: unknown key"),
        (["processing.return_baseline=zero"], "return_baseline is set but applies to DiCE only"),
        (
            ["algorithm.advantage_scaling=running", "processing.normalize_advantages=false"],
            "advantage_scaling is running but processing.normalize_advantages is off",
        ),
        (
            ["algorithm.advantage_scaling=running", "processing.adv_norm=variance"],
            "adv_norm is variance but algorithm.advantage_scaling is running",
        ),
    ],
)
def test_settings_that_an_actor_critic_has_no_use_for_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny("a2c", *changes)


def test_what_does_not_fit_the_actions_is_refused_before_anything_is_stored(tmp_path):
    settings = override(load_settings("a2c"), [*TINY, "policy.init_std=0.5"])
    with pytest.raises(ConfigError, match=r"init_std.* sets a standard deviation, but the"):
        train(build_config(settings), tmp_path / "run", backend=HERE)
    assert not (tmp_path / "run").exists()


def test_minima_are_for_actor_critics_and_particles_take_the_places_of_tasks():
    with pytest.raises(ConfigError, match="promp needs the same number of episodes"):
        build_config(override(load_settings("promp-point-corner"), ["min_steps=10"]))
    with pytest.raises(ConfigError, match=r"num_tasks is 3 but algorithm.num_particles is 4"):
        tiny("svpg", "num_tasks=3")
    assert tiny("svpg", "algorithm.num_particles=2").num_tasks == 2
