import numpy as np

from metaloom.pipeline.policies.actors.contract import UniformActor

ANYWHERE = np.full((60, 3), np.nan, np.float32)  # it does not look


def act(actor) -> np.ndarray:
    return np.array([actor.act(t, ANYWHERE, np.arange(60)) for t in range(len(actor.actions))])


def test_continuous_actions_are_uniform_over_what_a_tanh_can_give(setup):
    actions = act(UniformActor(setup({}, B=3, E=20, T=200, A=2)))
    n = actions.size
    assert -1 <= actions.min() < -0.999
    assert 0.999 < actions.max() <= 1
    counts, _ = np.histogram(actions, 10, (-1, 1))
    np.testing.assert_allclose(counts / n, 0.1, atol=4 * np.sqrt(0.09 / n))
    assert abs(np.corrcoef(actions.reshape(-1, 2).T)[0, 1]) < 4 / np.sqrt(n / 2)
    assert actions.dtype == np.float32


def test_discrete_actions_are_equally_likely(setup):
    actions = act(UniformActor(setup({}, B=3, E=20, T=200, num_actions=5)))
    n = actions.size
    np.testing.assert_allclose(np.bincount(actions.ravel()) / n, np.full(5, 0.2), atol=4 * np.sqrt(0.16 / n))
    assert actions.dtype == np.int64


def test_every_task_and_step_has_actions_of_its_own(setup):
    actions = act(UniformActor(setup({}, B=3, E=20, T=2, A=1)))
    assert len(np.unique(actions)) == actions.size


def test_rows_that_ended_leave_no_trace(setup):
    continuous, discrete = setup({}, B=3, E=20, T=1, A=2), setup({}, B=3, E=20, T=1, num_actions=5)
    rows = np.array([3, 40])
    for of in (continuous, discrete):
        actor = UniformActor(of)
        found = actor.act(0, ANYWHERE, rows)
        np.testing.assert_array_equal(actor.actions[0, rows], found)
        np.testing.assert_array_equal(of.taken[0, rows], found.reshape(2, -1))
        assert not np.delete(of.taken[0], rows, axis=0).any()
        assert (actor.behavior_by_step, actor.behavior_by_task) == ({}, {})
