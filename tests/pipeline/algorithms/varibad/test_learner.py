"""VariBAD's learner on small trials: what learns from what, and that the model comes to explain its trials."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_setups import A, O, small_setup

from metaloom.pipeline.algorithms.varibad.settings import VariBAD
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.policies.config import PolicyConfig
from metaloom.pipeline.replay.index import TrialBuffer, TrialExperience
from metaloom.pipeline.types import EpisodeBatch, Step

B, E, T, Z = 3, 4, 5, 2
SETUP = small_setup(PolicyConfig(hidden_sizes=(6,)))
SMALL = {
    "episodes_per_trial": 2,
    "latent_size": Z,
    "embedding_size": 5,
    "encoder_size": 6,
    "decoder_layers": (6,),
    "critic_hidden_sizes": (6,),
    "model_updates": 2,
    "trials_per_model_update": 3,
    "num_epochs": 2,
}


def episodes_of(seed=0, longest=T, shift=-3.0):
    rng, shape = np.random.default_rng(seed), (B, E, longest)
    none = np.zeros((B, E), np.bool_)
    posterior = {name: rng.standard_normal((*shape, Z), np.float32) for name in ("posterior_mean", "posterior_log_std")}
    return EpisodeBatch(
        observations=rng.standard_normal((B, E, longest + 1, O), np.float32),
        actions=rng.standard_normal((*shape, A), np.float32),
        rewards=rng.standard_normal(shape, np.float32) + np.float32(shift),
        terminated=none,
        truncated=~none,
        lengths=np.full((B, E), longest, np.int32),
        behavior={"mean": np.zeros((*shape, A), np.float32), "log_std": np.zeros((B, A), np.float32), **posterior},
        reward_terms={},
        initial_state=np.zeros((B, E, 0)),
    )


def buffer_of(*rounds):
    trials = [Trials(episodes, 2, 0) for episodes in rounds]
    return TrialBuffer([len(one) for one in trials], trials.__getitem__)


def updated(buffer=None, setup=SETUP, state=None, **settings):
    """A learner, its state before and after an update, and what describes it."""
    learner, episodes = VariBAD(**(SMALL | settings)).build(setup), episodes_of()
    state = state or learner.initialize(run_seed=1)
    step = Step(episodes, learner.process(state, episodes, seed=0), 0)
    experience = TrialExperience(step, buffer or buffer_of(episodes))
    after, metrics = learner.update(state, experience, run_seed=1, iteration=0)
    return learner, state, experience, after, metrics


def differing(left, right):
    """Names of the parameters, the critic's and the decoders' too, that differ."""
    pairs = [(of.params | of.extra) for of in (left, right)]
    return {name for name in pairs[0] if not np.array_equal(pairs[0][name], pairs[1][name])}


def belongs_to_model(name):
    return name.startswith(("encoder.", "cell.", "decoder."))


def test_policy_and_values_learn_from_the_iterations_trials_and_the_model_from_those_of_the_buffer():
    _, before, _, after, _ = updated()
    learned = differing(before, after) - {"critic.scale", "num_updates"}
    assert {name.partition(".")[0] for name in learned} >= {"encoder", "cell", "decoder", "critic", "mean_network"}

    *_, other, _ = updated(clip_eps=1e-3, learning_rate=1e-2)
    assert differing(after, other)
    assert not any(belongs_to_model(name) for name in differing(after, other))
    *_, other, _ = updated(buffer=buffer_of(episodes_of(seed=5)))
    assert differing(after, other)
    assert all(belongs_to_model(name) for name in differing(after, other))


def test_values_see_the_posterior_that_was_acted_on():
    learner, state, experience, *_ = updated()
    episodes = experience.step.episodes
    for name in ("posterior_mean", "posterior_log_std"):
        changed = replace(episodes, behavior={**episodes.behavior, name: episodes.behavior[name] + 1})
        values = [learner.process(state, of, seed=0).values for of in (episodes, changed)]
        assert not np.allclose(*values, atol=1e-3)


def test_the_critic_alone_sees_how_far_a_trial_has_come():
    learner, state, experience, *_ = updated()
    policy, episodes = learner.policy, experience.step.episodes
    of = learner.batch(state, experience.step).sequences(np.arange(2))
    moved = of.inputs.clone()
    moved[..., -1] -= 0.5
    params = {name: torch.tensor(value) for name, value in (state.params | state.extra).items()}
    (acting, values), (acting_there, values_there) = (policy.judged(params, x) for x in (of, replace(of, inputs=moved)))
    assert torch.equal(acting.mean, acting_there.mean)
    assert not torch.allclose(values, values_there)
    assert learner.inputs(learner.trials(episodes)).shape[-1] == of.inputs.shape[-1]


def test_a_trial_whose_posterior_behind_its_end_nobody_knows_is_not_bootstrapped():
    with pytest.raises(ValueError, match="Input should be 'seen' or 'unseen'"):
        VariBAD(**SMALL, trial_end="bootstrapped")


def test_an_update_is_the_same_again_and_leaves_its_input_alone():
    learner, state, experience, after, metrics = updated()
    before = {name: value.copy() for name, value in (state.params | state.extra | state.optimizer).items()}
    again, told = learner.update(state, experience, run_seed=1, iteration=0)
    assert told == metrics
    assert not differing(again, after)
    for name, value in (state.params | state.extra | state.optimizer).items():
        assert np.array_equal(value, before[name])
    other, _ = learner.update(state, experience, run_seed=1, iteration=1)
    assert {belongs_to_model(name) for name in differing(other, after) - {"num_updates"}} == {True, False}


class Noting(TrialBuffer):
    """Notes which trials are taken."""

    def take(self, numbers):
        self.taken = [*getattr(self, "taken", ()), numbers.tolist()]
        return super().take(numbers)


def test_every_gradient_step_of_the_model_draws_trials_of_its_own():
    trials = Trials(episodes_of(), 2, 0)
    buffer = Noting([len(trials)], lambda number: trials)
    updated(buffer=buffer, model_updates=3)
    assert len({*map(tuple, buffer.taken)}) == 3


def test_two_updates_go_on_from_the_state_of_both_optimizers():
    _, _, _, after, _ = updated()
    assert {name.partition(".")[0] for name in after.optimizer} == {"policy", "model"}
    *_, second, _ = updated(state=after)
    fresh = replace(after, optimizer=updated()[1].optimizer)
    *_, other, _ = updated(state=fresh)
    names = differing(second, other)
    assert any(belongs_to_model(name) for name in names)
    assert any(not belongs_to_model(name) for name in names)


def test_a_deviation_that_is_not_learned_stays():
    setup = replace(SETUP, policy=PolicyConfig(hidden_sizes=(6,), learn_std=False))
    _, before, _, after, _ = updated(setup=setup)
    assert "log_std" not in differing(before, after)
    assert "mean_network.output.kernel" in differing(before, after)


@pytest.mark.parametrize("options", [{}, {"elbo_steps": 4, "decoded_steps": 3}], ids=["all", "some"])
def test_rounds_of_other_lengths_are_learned_from_together(options):
    buffer = buffer_of(episodes_of(seed=1, longest=3), episodes_of(seed=2, longest=5))
    *_, metrics = updated(buffer=buffer, trials_per_model_update=12, **options)
    assert np.isfinite([*metrics.values()]).all()
    assert {"elbo", "reward_log_likelihood", "posterior_kl"} <= metrics.keys()


def test_fewer_trials_than_a_gradient_step_takes_are_all_taken():
    *_, metrics = updated(trials_per_model_update=1000)
    assert np.isfinite(metrics["elbo"])


@pytest.mark.parametrize(
    "options",
    [{}, {"reward_decoder": "heads"}, {"reward_likelihood": "bernoulli"}, {"decode_states": True}],
    ids=["network", "heads", "bernoulli", "states"],
)
def test_the_model_comes_to_explain_its_trials(options):
    # Rewards far from what a fresh decoder predicts.
    episodes = episodes_of(shift=5.0)
    few, many = (
        updated(buffer=buffer_of(episodes), model_updates=n, model_learning_rate=1e-2, **options)[-1] for n in (1, 60)
    )
    assert many["elbo"] > few["elbo"] + 1
    assert ("state_log_likelihood" in many) == ("decode_states" in options)


@pytest.mark.parametrize("part", ["reward_log_likelihood", "state_log_likelihood", "posterior_kl"])
def test_each_part_of_the_bound_is_learned_by_its_own_weight(part):
    parts = ("reward_log_likelihood", "state_log_likelihood", "posterior_kl")
    names = dict(zip(parts, ("reward_weight", "state_weight", "kl_weight"), strict=True))
    weights = {name: float(of == part) for of, name in names.items()}
    few, many = (updated(decode_states=True, model_updates=n, model_learning_rate=0.01, **weights)[-1] for n in (1, 20))
    assert (many[part] > few[part]) == (part != "posterior_kl")
    found = [many[name] for name in names]
    assert many["elbo"] == pytest.approx(found[0] + found[1] - found[2])


def test_the_models_first_step_has_its_step_size():
    # Adam's first step is α g / (|g| + 1e-8), and its first moment is then g / 10.
    _, before, _, after, _ = updated(model_updates=1, reward_weight=1e-6, kl_weight=1e-6)
    (before, after), moments = ((of.params | of.extra for of in (before, after)), after.optimizer)
    gradient = 10 * moments["model.first_moment"]
    names = [name for name in before if belongs_to_model(name)]
    step = np.concatenate([(before[name].astype(np.float64) - after[name]).ravel() for name in names])
    np.testing.assert_allclose(np.sort(step), np.sort(1e-3 * gradient / (np.abs(gradient) + 1e-8)), atol=1e-7)


def test_the_schedule_holds_for_both_step_sizes():
    *_, after, _ = updated()
    *_, second, metrics = updated(state=after, lr_schedule="linear", lr_horizon=1)
    assert metrics["learning_rate"] == 0
    assert differing(after, second) == {"critic.scale", "num_updates"}
