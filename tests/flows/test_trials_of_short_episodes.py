"""Trials whose episodes end at different steps: what learns sees them as they were acted in, one after the other."""

import numpy as np
import pytest
import torch
from cell_steps import STEPS, gru_step
from memory_runs import SERIAL, recipe_config, require_replayed

import metaloom
from metaloom.flows.commands.train import train
from metaloom.pipeline.policies.posterior import POSTERIOR_LOG_STD, POSTERIOR_MEAN

ENV = '''
import numpy as np
from gymnasium.spaces import Box, Discrete
from metaloom.pipeline.envs.contract import MetaEnv, TaskField

class Ends(MetaEnv):
    """Ends by chance after any step; the first action pays what the task says, whoever takes it."""

    task_fields = (TaskField("pay", "1", "of the first action"),)
    action_components = ()
    observation_components = (("t", "1"), ("noise", "1"))

    def __init__(self):
        self.observation_space, self.action_space = Box(-9, 9, (2,), np.float64), Discrete(3)

    def sample_tasks(self, num_tasks, rng):
        return rng.uniform(-1, 1, (num_tasks, 1))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return np.array([0, self.np_random.normal()]), {}

    def step(self, action):
        self._t += 1
        reward = float(self.task[0] if action == 0 else 0.1)
        ended = bool(self.np_random.random() < 0.3)
        return np.array([self._t, self.np_random.normal()]), reward, ended, False, {"reward_terms": {"pay": reward}}
'''
SMALL = ("env=short_ends:Ends", "env.action_scale=null", "iterations=2", "num_tasks=3", "max_episode_steps=7",
         "algorithm.episodes_per_trial=3", "episodes_per_task=6", "evaluation.num_tasks=2")  # fmt: skip
NETWORKS = ("gru", "linear-attention", "linear-attention asinh")


@pytest.fixture(scope="module", autouse=True)
def ends(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ends")
    (folder / "short_ends.py").write_text(ENV)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


def made(recipe, folder, *settings):
    train(recipe_config(recipe, [*SMALL, *settings]), folder, backend=SERIAL)
    return metaloom.open_run(folder)


def sequences(batch, task, trial):
    """Inputs of a trial as it was acted in, [L, in], and the places of its steps: written out, episode by episode."""
    last, inputs, places = np.zeros(5), [], []
    for episode in (trial, 2 + trial, 4 + trial):
        length = batch.lengths[task, episode]
        for t in range(length):
            inputs.append(np.concatenate([batch.observations[task, episode, t], last]))
            places.append((task, episode, t))
            action = np.eye(3)[batch.actions[task, episode, t]]
            last = np.array([*action, batch.rewards[task, episode, t], t + 1 == length])
    return torch.tensor(np.array(inputs)), tuple(np.array(places).T)


@pytest.mark.parametrize("network", NETWORKS)
def test_states_are_those_of_the_real_steps_alone_in_acting_and_in_learning(network, tmp_path):
    name, _, reading = network.partition(" ")
    options = [f"policy.network_options.reading={reading}"] if reading else []
    run = made("rl2-tabular-mdp", tmp_path / "run", f"policy.network={name}", "policy.hidden_sizes=[6]", *options)
    require_replayed(tmp_path / "run")
    batch, state = run[1].rollouts(0), run[1].learner()
    assert len({*batch.lengths.ravel().tolist()}) > 3
    learner = run.policy(1).blueprint.learner()
    trials = learner.trials(batch)
    params = {name: torch.tensor(value) for name, value in (state.params | state.extra).items()}
    of_all = torch.tensor(trials.inputs.swapaxes(0, 1))
    features = learner.policy.features(params, of_all)
    learned = learner.policy.distribution(params, features.flatten(0, 1)).log_probs.unflatten(0, features.shape[:2])
    double = {name: torch.tensor(value).double() for name, value in state.params.items()}
    for task in range(3):
        for trial in range(2):
            inputs, places = sequences(batch, task, trial)
            kept, expected = torch.zeros(learner.policy.cell.state_size, dtype=torch.float64), []
            for x in inputs:
                features, kept = STEPS[network](double, x, kept)
                logits = features @ double["logits_network.output.kernel"] + double["logits_network.output.bias"]
                expected.append(torch.log_softmax(logits, -1))
            expected = torch.stack(expected)
            np.testing.assert_allclose(batch.behavior["log_probs"][places], expected, atol=1e-5)
            np.testing.assert_allclose(learned[: len(inputs), 2 * task + trial], expected, atol=1e-5)


def test_beliefs_are_inferred_from_the_real_steps_alone_and_begin_with_the_first_observation(tmp_path):
    run = made(
        "varibad-hidden-goal-grid", tmp_path / "run", "algorithm.encoder_size=6", "algorithm.reward_decoder=network"
    )
    require_replayed(tmp_path / "run")
    batch, params = run[1].rollouts(0), {n: torch.tensor(v).double() for n, v in run[1].learner().params.items()}
    assert len({*batch.lengths.ravel().tolist()}) > 3
    for task in range(3):
        for trial in range(2):
            (inputs, places), kept = sequences(batch, task, trial), torch.zeros(6, dtype=torch.float64)
            believed = []
            for x in inputs:
                embedded = torch.relu(x @ params["encoder.embedding.kernel"] + params["encoder.embedding.bias"])
                features, kept = gru_step(params, embedded, kept)
                believed.append(features @ params["encoder.posterior.kernel"] + params["encoder.posterior.bias"])
            found = np.concatenate([batch.behavior[name][places] for name in (POSTERIOR_MEAN, POSTERIOR_LOG_STD)], -1)
            np.testing.assert_allclose(found, torch.stack(believed), atol=1e-5)


def test_a_resumed_run_is_one_that_was_never_interrupted(tmp_path, digests):
    settings = ("policy.hidden_sizes=[6]", "evaluation.every=1")
    made("rl2-tabular-mdp", tmp_path / "whole", *settings)
    made("rl2-tabular-mdp", tmp_path / "stopped", *settings, "iterations=1")
    metaloom.resume(tmp_path / "stopped", iterations=2, backend=SERIAL)
    assert digests(tmp_path / "stopped") == digests(tmp_path / "whole")
