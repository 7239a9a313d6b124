"""Runs that infer their tasks within a trial: stored, resumed, forked and computed again, and beliefs to the bit."""

import numpy as np
import pytest
from memory_runs import SERIAL, recipe_config, require_replayed, trained_once

import metaloom
from metaloom import storage
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.optimize import optimize
from metaloom.flows.commands.thin import thin
from metaloom.flows.commands.train import resume, train
from metaloom.flows.operations.evaluate import evaluate
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.run import build_stored
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.policies.posterior import PosteriorNetwork
from metaloom.pipeline.policies.remembering import Remembering, recollect
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import TaskParams
from metaloom.storage import Span, StageRef

pytestmark = pytest.mark.usefixtures("warm")

SMALL = (
    "policy.hidden_sizes=[8]",
    "iterations=4",
    "num_tasks=3",
    "episodes_per_task=4",
    "max_episode_steps=6",
    "algorithm.episodes_per_trial=2",
    "algorithm.encoder_size=6",
    "algorithm.embedding_size=6",
    "algorithm.latent_size=2",
    "algorithm.decoder_layers=[8]",
    "algorithm.critic_hidden_sizes=[8]",
    "algorithm.num_epochs=2",
    "algorithm.model_updates=2",
    "algorithm.trials_per_model_update=5",
    "algorithm.buffer_iterations=2",
    "evaluation.every=2",
    "evaluation.num_tasks=2",
    "evaluation.test_episodes=3",
)
RUNS = {
    "grid": ("varibad-hidden-goal-grid",),
    # See test_trials_of_short_episodes.py for episodes that end early.
    "robot": ("varibad-half-cheetah-dir", "env=navigation-2d", "algorithm.elbo_steps=3", "algorithm.decoded_steps=4"),
}


def config_of(name, *changes):
    recipe, *settings = RUNS[name]
    return recipe_config(recipe, [*SMALL, *settings, *changes])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Small runs by name, trained once in this process."""
    return trained_once(tmp_path_factory, config_of)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_learns_and_replays_bit_for_bit(made, name):
    run = storage.open_run(made(name))
    start, end = run[0].learner(), run[3].update().learner
    assert all(not np.array_equal(start.params[p], end.params[p]) for p in start.params)
    decoders = [p for p in start.extra if p.startswith("decoder.")]
    assert decoders
    assert all(not np.array_equal(start.extra[p], end.extra[p]) for p in decoders)
    require_replayed(made(name))


def test_an_update_reads_the_trials_of_the_last_iterations_from_the_store(made):
    run = storage.open_run(made("grid"))
    spans = [run.record(StageRef(i, "meta_optimize")).spans[0].span for i in range(4)]
    assert spans == [Span(("collect_rollouts",), first, last) for first, last in ((0, 0), (0, 1), (1, 2), (2, 3))]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_the_digests_of_this_process(made, tmp_path, digests, workers):
    train(config_of("robot"), tmp_path / "run", backend=Backend(workers=workers))
    assert digests(tmp_path / "run") == digests(made("robot"))


def test_a_resumed_run_is_one_that_was_never_interrupted(made, tmp_path, digests):
    train(config_of("robot", "iterations=2"), tmp_path / "run", backend=SERIAL)
    resume(tmp_path / "run", iterations=4, backend=SERIAL)
    assert digests(tmp_path / "run") == digests(made("robot"))


def test_trials_that_do_not_fit_into_memory_are_read_anew_which_changes_no_bit(made, tmp_path, digests, monkeypatch):
    monkeypatch.setattr("metaloom.stages.memory.replay.MIB", 0)
    train(config_of("grid"), tmp_path / "run", backend=SERIAL)
    assert digests(tmp_path / "run") == digests(made("grid"))


def test_a_fork_goes_on_as_its_parent_did_unless_a_setting_changes(made, tmp_path, digests):
    for name, changes in (("same", ()), ("other", ("algorithm.kl_weight=0.5",))):
        fork(made("robot"), 2, tmp_path / name, changes)
        resume(tmp_path / name, backend=SERIAL)
    same, other, parent = digests(tmp_path / "same"), digests(tmp_path / "other"), digests(made("robot"))
    assert same == parent
    changed = {ref for ref in parent if other[ref] != parent[ref]}
    # The iteration's own trials are those of the parent; then another encoder acts.
    assert "2.meta_optimize.0" in changed
    assert "3.collect_rollouts.0" in changed
    assert not {ref for ref in changed if ref.startswith(("0.", "1.", "2.collect", "2.process"))}
    with pytest.raises(ConfigError, match=r"episodes_per_trial cannot change from 2 to 4"):
        fork(made("robot"), 2, tmp_path / "trials", ("algorithm.episodes_per_trial=4",))


def test_other_settings_of_the_model_are_tried_on_the_stored_trials(made):
    found = optimize(made("robot"), 3, ("algorithm.model_learning_rate=0.1",))
    assert found.stored.identical
    before, after = (outcome.value.metrics for outcome in (found.stored, found.changed))
    assert before["loss_after"] == after["loss_after"]
    assert before["elbo"] != after["elbo"]


def test_a_trial_of_most_likely_actions_remembers_such_alone_unless_earlier_versions_stored_the_run(made):
    """In a grid nothing is left to chance: the episode that is remembered then is the one that is tested."""
    asked = {"adaptation_steps": 3, "deterministic": True, "num_tasks": 8, "backend": SERIAL}
    trial, drawn = (evaluate(made("grid"), remembered=how, **asked).evaluation for how in ("as-tested", "drawn"))
    assert np.array_equal(trial.test_returns[:, :-1, :1], trial.adaptation_returns)
    assert not np.array_equal(drawn.test_returns[:, :-1, :1], drawn.adaptation_returns)
    settings = config_of("grid").model_dump(mode="json")
    assert build_stored(settings).evaluation.remembered is None
    del settings["evaluation"]["remembered"]
    assert build_stored(settings).evaluation.remembered == "drawn"
    with pytest.raises(ConfigError, match=r"remembered is drawn but the policy of promp has no memory"):
        recipe_config("promp-point-corner", ["evaluation.remembered=drawn"])


def test_beliefs_of_a_stored_run_come_again_bit_for_bit(made):
    run = metaloom.open_run(made("robot"))
    config, batch, state = config_of("robot"), run[1].rollouts(0), run[1].learner()
    spaces = run.policy(1).blueprint.spaces
    params = TaskParams.broadcast(state.params, 3)
    remembering = Remembering(config.policy, spaces, params, num_rows=2, network=PosteriorNetwork)
    posterior = np.concatenate([batch.behavior["posterior_mean"], batch.behavior["posterior_log_std"]], -1)
    for episodes in (slice(0, 2), slice(2, 4)):  # the first ones of the two trials of a task, then the second ones
        parts = (batch.observations, batch.actions, batch.rewards, batch.lengths)
        outputs = recollect(remembering, *(part[:, episodes] for part in parts))
        mask, lengths = batch.mask[:, episodes] != 0, batch.lengths[:, episodes]
        assert np.array_equal(outputs[mask], batch.behavior["mean"][:, episodes][mask])
        # The network's last step is the one behind the longest episode's last observation.
        longest = lengths == lengths.max()
        assert np.array_equal(
            remembering.network.posterior[longest], posterior[:, episodes][:, :, lengths.max() - 1][longest]
        )


def test_thinning_keeps_the_trials_that_later_iterations_learn_from(made, tmp_path, digests):
    path = tmp_path / "run"
    train(config_of("grid", "iterations=3"), path, backend=SERIAL)
    thin(path, storage.Retention(keep_last=0))
    run = storage.open_run(path)
    assert run[0].rollouts(0).rewards.any()
    with pytest.raises(storage.StageThinned):
        run[0].samples(0)
    resume(path, iterations=4, backend=SERIAL)
    assert digests(path) == digests(made("grid"))


def test_a_run_starts_from_the_model_of_another(made, tmp_path):
    train(config_of("grid", f"init_from={made('grid')}@2", "iterations=1"), tmp_path / "run", backend=SERIAL)
    start, parent = (storage.open_run(path)[i].learner() for path, i in ((tmp_path / "run", 0), (made("grid"), 2)))
    for name in ("encoder.embedding.kernel", "cell.hidden_kernel"):
        assert np.array_equal(start.params[name], parent.params[name])
    for name in ("decoder.rewards.output.kernel", "critic.hidden_0.kernel"):
        assert np.array_equal(start.extra[name], parent.extra[name])


def test_an_evaluation_has_a_return_for_every_number_of_episodes_seen(made):
    stored = storage.open_run(made("robot"))[1].evaluation()
    assert stored.test_returns.shape == (2, 2, 3)
    outcome = evaluate(made("robot"), adaptation_steps=3, backend=SERIAL)
    assert [row.adaptation_steps for row in outcome.summary()] == [0, 1, 2, 3]


def test_adapting_is_to_infer_and_a_saved_policy_keeps_what_it_has_seen(made, tmp_path):
    run = metaloom.open_run(made("robot"))
    policy, env = run.policy(1), make_env(config_of("robot").env)
    env.set_task(np.array([0.3, -0.2]))
    adapted = policy.adapt(env, episodes=2)
    seen = np.array([0.1, 0.2])
    fresh, inferred = policy.act(seen), adapted.act(seen)
    assert not np.array_equal(fresh, inferred)
    policy.observe(1.0, False)
    assert not np.array_equal(policy.act(seen), fresh)
    policy.reset()
    before = policy.log_prob(seen, fresh)
    assert np.array_equal(policy.log_prob(seen, fresh), before)
    adapted.save(tmp_path / "policy.safetensors")
    assert np.array_equal(metaloom.load_policy(tmp_path / "policy.safetensors").act(seen), inferred)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("episodes_per_task=3", "episodes_per_task is 3 but a trial has 2 episodes"),
        ("policy.network=gru", "varibad keeps its memory in its encoder"),
        ("baseline=linear_feature", "varibad learns its own values"),
        ("min_steps=10", "varibad has the same number of episodes in every trial"),
        ("algorithm.state_weight=0.5", "algorithm.state_weight is 0.5 but algorithm.decode_states is off"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_reason(change, reason):
    with pytest.raises(ConfigError, match=reason):
        config_of("grid", change)
