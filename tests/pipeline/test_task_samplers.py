import numpy as np
import pytest

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import EnvError, MetaEnv, TaskField
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.envs.task_classes import nearest
from metaloom.pipeline.tasks.samplers import (
    TaskDistribution,
    TaskPool,
    balanced_draw,
    class_quotas,
    distinct_tasks,
    shuffled_blocks,
)

FIELDS = (TaskField("kind", "1", "class of the task"), TaskField("goal", "m", "where to go"))
TASKS = np.array([[0, 0.1], [1, 0.2], [1, 0.3], [0, 0.4], [0, 0.5], [2, 0.6]])
POOL = TaskPool(FIELDS, TASKS)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_all_of_a_pool_is_every_task_in_order():
    batch = POOL.all()
    assert np.array_equal(batch.params, TASKS)
    assert batch.ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert (batch.names, batch.units) == (("kind", "goal"), ("1", "m"))


def test_a_pool_gives_no_task_twice_before_it_has_given_all():
    ids = POOL.sample(15, rng()).ids
    assert sorted(ids[:6]) == sorted(ids[6:12]) == list(range(6))
    assert len(set(ids[12:])) == 3
    assert ids[:6].tolist() != ids[6:12].tolist()


def test_with_replacement_draws_are_independent():
    ids = TaskPool(FIELDS, TASKS, with_replacement=True).sample(60, rng()).ids
    assert any(len(set(ids[start : start + 6])) < 6 for start in range(0, 60, 6))
    assert set(ids) == set(range(6))


def test_an_id_is_the_place_of_the_task():
    batch = POOL.sample(9, rng())
    assert np.array_equal(batch.params, TASKS[batch.ids])


def test_the_same_generator_gives_the_same_tasks_and_another_one_others():
    first, again, other = (POOL.sample(6, rng(seed)).ids.tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_every_round_has_one_task_of_each_class():
    assert POOL.sample_evenly(None, rng(), "kind").params[:, 0].tolist() == [0, 1, 2]
    batch = POOL.sample_evenly(9, rng(), "kind")
    assert batch.params[:, 0].tolist() == [0, 1, 2] * 3
    assert sorted(batch.ids[::3]) == [0, 3, 4]  # three of the three tasks of class 0: none twice
    assert np.array_equal(batch.params, TASKS[batch.ids])


def test_classes_refuse_what_cannot_be_even_and_a_field_that_no_task_has():
    with pytest.raises(EnvError, match="cannot draw 8 tasks evenly from the 3 values of kind; use a multiple"):
        POOL.sample_evenly(8, rng(), "kind")
    with pytest.raises(EnvError, match=r"no task field 'color'.*\['kind', 'goal'\]"):
        POOL.sample_evenly(3, rng(), "color")


class Dice:
    """Stands for an environment whose tasks are the faces of a die that it does not list."""

    task_fields = (TaskField("face", "1", "what to throw"),)
    unwrapped = property(lambda self: self)

    def sample_tasks(self, num_tasks, rng):
        return rng.integers(1, 7, size=(num_tasks, 1)).astype(float)


def test_a_distribution_leaves_out_what_was_seen():
    seen = np.array([[1.0], [2.0], [3.0]])
    batch = TaskDistribution(Dice(), seen).sample(200, rng())
    assert set(batch.params[:, 0]) == {4, 5, 6}
    assert set(batch.ids) == {-1}


def test_a_distribution_with_nothing_else_to_give_is_refused():
    with pytest.raises(EnvError, match=r"Dice.*task_set.*test_task_set"):
        TaskDistribution(Dice(), np.arange(1.0, 7)[:, None]).sample(3, rng())


def test_without_anything_seen_it_is_the_environments_own_draw():
    env = make_env(EnvConfig(name="half-cheetah-vel"))
    batch = TaskDistribution(env, np.zeros((0, 1))).sample(5, rng())
    assert np.array_equal(batch.params, env.sample_tasks(5, rng()))


def test_tasks_of_another_form_are_refused():
    with pytest.raises(EnvError, match=r"shape \(2, 3\).*\('kind', 'goal'\)"):
        TaskPool(FIELDS, np.zeros((2, 3))).all()
    with pytest.raises(EnvError, match="finite"):
        TaskPool(FIELDS, np.array([[0, np.nan]])).all()


def test_no_blocks_are_needed_for_no_tasks():
    assert shuffled_blocks(4, 0, rng()).tolist() == []


def test_distinct_tasks_are_different_ones_of_the_set_with_their_places_as_ids():
    env = make_env(EnvConfig(name="pearl-point-robot"))
    batch = distinct_tasks(env, 80, rng())
    assert sorted(batch.ids) == list(range(80))
    assert batch.ids.tolist() != list(range(80))
    assert np.array_equal(batch.params, np.array(env.task_set)[batch.ids])
    assert (batch.names, batch.units) == (("goal_x", "goal_y"), ("m", "m"))


def test_every_task_is_as_likely_to_be_among_the_distinct_ones():
    env, generator = make_env(EnvConfig(name="pearl-point-robot")), rng(3)
    drawn = [distinct_tasks(env, 8, generator).ids for _ in range(400)]
    assert all(len(set(ids)) == 8 for ids in drawn)
    counts = np.bincount(np.concatenate(drawn), minlength=80)
    # Of 400 draws with probability 1/10 each: 40, with a standard deviation of 6.
    assert np.abs(counts - 40).max() < 5 * 6


def test_a_single_task_without_parameters_can_be_drawn():
    batch = distinct_tasks(make_env(EnvConfig(name="point-2d")), 1, rng())
    assert (batch.params.shape, batch.ids.tolist()) == ((1, 0), [0])


def test_more_distinct_tasks_than_there_are_and_tasks_without_a_set_are_refused():
    with pytest.raises(
        EnvError, match="cannot draw 3 tasks from the 2 of PearlCheetahDir; use at most 2, since no task"
    ):
        distinct_tasks(make_env(EnvConfig(name="pearl-cheetah-dir")), 3, rng())
    with pytest.raises(EnvError, match="Navigation2D draws its tasks from a distribution; use a fixed set"):
        distinct_tasks(make_env(EnvConfig(name="navigation-2d")), 3, rng())


KINDS = nearest("kind", {"zero": 0, "one": 1, "two": 2})


class Env(MetaEnv):
    task_fields = FIELDS


@pytest.mark.parametrize("num_tasks", [1, 3, 8, 9])
def test_quotas_differ_by_one_at_most_and_the_remainder_is_drawn(num_tasks):
    quotas = class_quotas(3, num_tasks, rng())
    assert sum(quotas) == num_tasks
    assert max(quotas) - min(quotas) == (num_tasks % 3 > 0)
    drawn = {tuple(class_quotas(3, num_tasks, rng(seed))) for seed in range(40)}
    assert len(drawn) == (3 if num_tasks % 3 else 1)


def test_a_balanced_draw_takes_draws_in_their_order_until_each_class_is_full():
    rows = iter(np.array([[0, 0.1], [0, 0.2], [0, 0.3], [1, 0.4], [2, 0.5], [0, 0.6], [2, 0.7], [1, 0.8], [1, 0.9]]))
    found = balanced_draw(Env(), KINDS, 6, rng(), lambda n: np.stack([next(rows) for _ in range(3)]))
    assert found[:, 1].tolist() == [0.1, 0.2, 0.4, 0.5, 0.7, 0.8]
    # Classes that are held out have no part in training.
    held_out = nearest("kind", {"zero": 0, "one": 1, "two": 2}, held_out=["zero"])
    assert balanced_draw(Env(), held_out, 2, rng(), lambda n: TASKS)[:, 1].tolist() == [0.2, 0.6]


def test_a_class_that_never_comes_up_is_named():
    with pytest.raises(EnvError, match=r"Env: too few tasks of the class 'two' among 3000 draws"):
        balanced_draw(Env(), KINDS, 3, rng(), lambda n: np.array([[0, 0.1], [1, 0.2], [1, 0.3]]))


def test_a_pool_gives_equally_many_of_every_class_and_none_twice_before_it_must():
    batch = POOL.sample_balanced(9, rng(), KINDS)
    assert np.bincount(batch.params[:, 0].astype(int)).tolist() == [3, 3, 3]
    assert np.array_equal(batch.params, TASKS[batch.ids])
    assert sorted(batch.ids[batch.params[:, 0] == 0]) == [0, 3, 4]
    assert batch.params[:, 0].tolist() != sorted(batch.params[:, 0])
    with pytest.raises(EnvError, match="none of the 6 tasks has the class 'three'"):
        POOL.sample_balanced(4, rng(), nearest("kind", {"zero": 0, "one": 1, "two": 2, "three": 3}))
