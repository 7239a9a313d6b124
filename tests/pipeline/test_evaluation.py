import numpy as np
import pytest

from metaloom.pipeline.config.input import ConfigError, override
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.envs.contract import EnvError, MetaEnv, TaskField
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.seeding import generator, seed_for
from metaloom.pipeline.tasks.evaluation import EvaluationPlan, evaluation_tasks, tasks_are_new, tasks_drawn_from
from metaloom.pipeline.tasks.samplers import draw_tasks

BASE = {"env": "half-cheetah-vel", "algorithm": "promp", "num_tasks": 4, "iterations": 3}


def config(**changes):
    return build_config({**BASE, "algorithm": {"name": "promp"}, **changes})


class Fixed(MetaEnv):
    """Stands for an environment with its own training and test tasks."""

    task_fields = (TaskField("goal", "m", "where to go"),)
    task_set = ((1.0,), (2.0,), (3.0,))
    test_task_set = ((4.0,), (5.0,))

    def sample_tasks(self, num_tasks, rng):
        return rng.choice(np.array(self.task_set), num_tasks)


def test_what_is_left_out_is_as_in_training():
    plan = EvaluationPlan.of(config(episodes_per_task=7, algorithm={"name": "promp", "inner_steps": 2}))
    assert (plan.adaptation_steps, plan.episodes, plan.test_episodes, plan.deterministic) == (2, 7, 7, False)
    assert config().evaluation.every is None
    in_trials = config(episodes_per_task=6, algorithm={"name": "rl2", "episodes_per_trial": 2})
    assert EvaluationPlan.of(in_trials).episodes == 1


def test_what_is_given_is_taken():
    asked = {"adaptation_steps": 0, "episodes": 3, "test_episodes": 5, "deterministic": True}
    plan = EvaluationPlan.of(config(evaluation=asked))
    assert (plan.adaptation_steps, plan.episodes, plan.test_episodes, plan.deterministic) == (0, 3, 5, True)


def test_every_run_seed_and_every_evaluation_seed_draws_something_else():
    seeds = {EvaluationPlan.of(config(seed=s, evaluation={"seed": e})).run_seed for s in (1, 2) for e in (0, 1)}
    assert seeds == {seed_for(s, "evaluation", e) // 2 for s in (1, 2) for e in (0, 1)}
    assert len(seeds) == 4
    assert not seeds & {1, 2}


def test_held_out_tasks_are_the_environments_own_where_it_has_them():
    held_out = config()
    assert evaluation_tasks(held_out, Fixed(), 3).params.tolist() == [[4.0], [5.0]]
    assert tasks_are_new(held_out, Fixed())
    train = config(evaluation={"tasks": "train"})
    assert sorted(evaluation_tasks(train, Fixed(), 3).params[:3, 0]) == [1, 2, 3]
    assert len(evaluation_tasks(train, Fixed(), 3)) == 4  # as many as in training
    assert not tasks_are_new(train, Fixed())
    overlapping = Fixed()
    overlapping.test_task_set = (*overlapping.test_task_set, overlapping.task_set[0])
    assert not tasks_are_new(held_out, overlapping)
    assert len(evaluation_tasks(config(evaluation={"num_tasks": 5}), Fixed(), 3)) == 5


def test_the_number_of_tasks_to_choose_from_is_that_of_the_set():
    of = lambda asked: tasks_drawn_from(config(evaluation=asked), Fixed(), 3)  # noqa: E731
    assert of({}) == of({"num_tasks": 1}) == 2
    assert of({"tasks": "train"}) == 3
    assert of({"tasks": [[0.5], [0.25], [1.0], [2.0]]}) == 4
    assert tasks_drawn_from(config(), make_env(config().env), 3) is None


def test_a_wrapped_environment_keeps_its_held_out_tasks():
    env = make_env(config().env)
    assert env.test_task_set is None
    from metaloom.pipeline.envs.wrappers import PolicyActions

    inner = Fixed()
    inner.action_space = env.action_space
    inner.observation_space = env.observation_space
    assert PolicyActions(inner, None).test_task_set == Fixed.test_task_set


def test_held_out_draws_are_none_of_those_of_training():
    class Faces(Fixed):
        task_set = test_task_set = None

        def sample_tasks(self, num_tasks, rng):
            return rng.integers(0, 40, size=(num_tasks, 1)).astype(float)

    asked = config(evaluation={"num_tasks": 30})
    trained = [Faces().sample_tasks(4, generator(asked.seed, "tasks", i)) for i in range(3)]
    drawn = evaluation_tasks(asked, Faces(), 3).params
    assert len(drawn) == 30
    assert not np.isin(drawn, np.concatenate(trained)).any()
    rng = generator(EvaluationPlan.of(asked).run_seed, "tasks", 0)
    assert np.array_equal(evaluation_tasks(asked, Faces(), 0).params, Faces().sample_tasks(30, rng))
    assert 0 in evaluation_tasks(config(evaluation={"num_tasks": 300}), Faces(), 0).params
    for updates, iteration in ((3, 2), (1, 0), (0, 0)):
        latest = evaluation_tasks(config(evaluation={"tasks": "train"}), Faces(), updates).params
        assert np.array_equal(latest, Faces().sample_tasks(4, generator(asked.seed, "tasks", iteration)))


def test_a_list_of_tasks_is_taken_as_it_is():
    asked = config(evaluation={"tasks": [[0.5], [0.25]]})
    batch = evaluation_tasks(asked, make_env(asked.env), 0)
    assert batch.params.tolist() == [[0.5], [0.25]]
    assert not tasks_are_new(asked, make_env(asked.env))


def test_an_environment_with_a_single_task_is_tested_on_it():
    asked = config(env={"name": "point-2d"})
    assert evaluation_tasks(asked, make_env(asked.env), 2).params.shape == (4, 0)


def test_classes_are_drawn_evenly_from_finitely_many_tasks_alone():
    asked = config(evaluation={"tasks": "train", "evenly_by": "goal"})
    assert evaluation_tasks(asked, Fixed(), 1).params.tolist() == [[1.0], [2.0], [3.0]]
    twice = config(evaluation={"tasks": "train", "evenly_by": "goal", "num_tasks": 6})
    assert evaluation_tasks(twice, Fixed(), 1).params.tolist() == [[1.0], [2.0], [3.0]] * 2
    even = config(evaluation={"evenly_by": "velocity"})
    env = make_env(even.env)
    with pytest.raises(EnvError, match="drawn from a distribution; it needs a finite set"):
        evaluation_tasks(even, env, 1)


def test_evaluating_is_no_part_of_what_decides_training():
    assert config().digest() == config(evaluation={"every": 5, "seed": 3}).digest()


@pytest.mark.parametrize(
    ("evaluation", "found"),
    [
        ({"every": 0}, "evaluation.every"),
        ({"tasks": "heldout"}, "evaluation.tasks"),
        ({"tasks": [[1.0], [1.0, 2.0]]}, r"rows of equal length, got lengths \[1, 2\]"),
        ({"tasks": []}, "tasks must be rows of equal length"),
        ({"num_tasks": 0}, "evaluation.num_tasks"),
        ({"adaptation_steps": -1}, "evaluation.adaptation_steps"),
        ({"episodes": 0}, "evaluation.episodes"),
        ({"test_episodes": 1.5}, "evaluation.test_episodes"),
        ({"seed": -1}, "evaluation.seed"),
        ({"often": 1}, "evaluation.often: unknown key"),
    ],
)
def test_settings_that_mean_nothing_are_refused(evaluation, found):
    with pytest.raises(ConfigError, match=found):
        config(evaluation=evaluation)


def test_adaptation_steps_need_an_algorithm_that_adapts():
    with pytest.raises(ConfigError, match="promp does not adapt"):
        config(algorithm={"name": "promp", "inner_steps": 0}, evaluation={"adaptation_steps": 1})


def test_it_can_be_set_from_the_command_line():
    settings = override(config().model_dump(mode="json"), ["evaluation.every=5", "evaluation.tasks=[[1.0], [2.0]]"])
    assert build_config(settings).evaluation.tasks == ((1.0,), (2.0,))


def test_balanced_tasks_are_held_out_from_what_was_drawn_balanced():
    asked = {"task_sampling": "balanced", "num_tasks": 7}
    env = make_env(config().env)
    settings = config(task_sampling="balanced", evaluation=asked)
    tasks = evaluation_tasks(settings, env, 3)
    counts = np.bincount(env.task_classes.of(tasks.params, tasks.names))
    assert sorted(counts) == [2, 2, 3]
    trained = evaluation_tasks(config(task_sampling="balanced", evaluation={"tasks": "train"}), env, 3)
    assert np.bincount(env.task_classes.of(trained.params, trained.names)).max() == 2  # of four tasks in three classes
    assert (
        trained.params.tolist() == draw_tasks(env, num_tasks=4, run_seed=1, iteration=2, balanced=True).params.tolist()
    )
    directions = config(env="half-cheetah-dir", evaluation=asked)
    of_set = evaluation_tasks(directions, make_env(directions.env), 3)
    assert sorted(np.bincount(of_set.ids)) == [3, 4]
    given = {"tasks": [[0.1], [0.2], [0.3], [1.5], [2.9]], "task_sampling": "balanced", "num_tasks": 6}
    of_list = evaluation_tasks(config(evaluation=given), env, 3)
    assert [*np.bincount(env.task_classes.of(of_list.params, of_list.names))] == [2, 2, 2]


def test_balanced_evaluation_is_refused_without_classes_and_beside_evenly_by():
    with pytest.raises(EnvError, match=r"evaluation\.task_sampling is balanced, but Fixed declares no classes"):
        evaluation_tasks(config(evaluation={"task_sampling": "balanced"}), Fixed(), 3)
    with pytest.raises(ConfigError, match="evenly_by is goal; remove one of them"):
        config(evaluation={"task_sampling": "balanced", "evenly_by": "goal"})
