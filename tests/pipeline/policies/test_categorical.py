from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from metaloom.pipeline.policies.actors.on_policy import CategoricalActor


@pytest.mark.parametrize(
    ("probabilities", "draws", "actions"),
    [
        ([0.25, 0.25, 0.5], [0, 0.24, 0.26, 0.49, 0.51, 1 - 2**-24], [0, 0, 1, 1, 2, 2]),
        ([1e-80, 0.5, 0.5], [0, 0.51], [1, 2]),  # what has no probability is not taken by the least draw either
    ],
)
def test_actions_are_where_a_draw_falls_among_the_cumulative_probabilities(
    probabilities, draws, actions, setup, constant_network
):
    params = constant_network("logits_network", 1, 5, [*np.log(probabilities)])
    rng = SimpleNamespace(random=lambda shape, dtype: np.array(draws, dtype).reshape(shape))
    actor = CategoricalActor(replace(setup(params, B=1, E=len(draws), num_actions=3), rngs=[rng]))
    found = actor.act(0, np.zeros((len(draws), 5), np.float32), np.arange(len(draws)))
    assert found.tolist() == actions
    np.testing.assert_allclose(actor.behavior_by_step["log_probs"][0, 0], np.log(probabilities), rtol=1e-5)
