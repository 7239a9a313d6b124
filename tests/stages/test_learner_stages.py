"""initialize, meta_optimize and update around a learner that counts."""

from types import SimpleNamespace

import numpy as np
import pytest

from metaloom.pipeline.algorithms.contract import Learner
from metaloom.pipeline.algorithms.off_policy.settings import CollectionRound
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.dataflow.stage import At
from metaloom.pipeline.estimation.diagnostics import Measures
from metaloom.pipeline.types import EpisodeBatch, LearnerState, Samples, Step, TaskParams, Update
from metaloom.stages.adapt import adapt
from metaloom.stages.counters import (
    ENV_STEPS,
    ENV_STEPS_NOMINAL,
    require_complete,
    require_params,
    require_state,
)
from metaloom.stages.faults import StageFault
from metaloom.stages.initialize import initialize
from metaloom.stages.meta_optimize import meta_optimize
from metaloom.stages.update import update as update_stage

B, E, T = 3, 2, 4
LENGTHS = np.array([[4, 1], [2, 3], [4, 4]], np.int32)


class Counting(Learner):
    """Adds the number of the iteration to its only parameter, and says how many steps it was shown."""

    def initialize(self, *, run_seed):
        return LearnerState({"weight": np.full(2, run_seed, np.float32)}, {}, {})

    def update(self, state, experience, *, run_seed, iteration, parallel=map):
        weight = state.params["weight"] + np.float32(iteration)
        return LearnerState({"weight": weight}, {}, {}), {"shown": float(len(experience))}


LEARNER = Counting()


def first(start=None):
    return initialize(LEARNER, At(3, 0), lambda: start)


def learned(state, steps, iteration, learner=LEARNER):
    episodes, samples = zip(*((step.episodes, step.samples) for step in steps), strict=True)
    return meta_optimize(
        learner, At(3, iteration), map, Measures({}, {}), state=state, episodes=episodes, samples=samples
    )


class Replay:
    """A replay buffer of which nothing is drawn."""

    def minibatches(self, rounds, drawn):
        return []


@pytest.fixture
def updated(monkeypatch):
    """The stage `update` of an iteration that collects by the prior and by the posterior, in turn."""
    plan = SimpleNamespace(rounds=[CollectionRound(1), CollectionRound(1, from_posterior=True)])
    monkeypatch.setattr("metaloom.stages.update.plan_of", lambda config: plan)

    def stage(learner, state, episodes, iteration, fill=None):
        tools = (learner, At(3, iteration), map, Measures({}, {}), None, Replay())
        return update_stage(*tools, state=state, rounds=None, drawn=None, episodes=episodes, fill=fill)

    return stage


@pytest.fixture
def steps() -> list[Step]:
    rng = np.random.default_rng(0)
    return [random_step(rng, k) for k in range(2)]


def random_step(rng, k):
    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    mask = (np.arange(T) < LENGTHS[..., None]).astype(np.float32)
    rewards = normal(B, E, T) * mask
    episodes = EpisodeBatch(
        observations=normal(B, E, T + 1, 2),
        actions=normal(B, E, T, 1),
        rewards=rewards,
        terminated=np.zeros((B, E), bool),
        truncated=np.ones((B, E), bool),
        lengths=LENGTHS,
        behavior={"mean": 0.1 * normal(B, E, T, 1), "log_std": np.zeros((B, 1), np.float32)},
        reward_terms={},
        initial_state=np.zeros((B, E, 0)),
    )
    return Step(episodes, Samples(rewards, rewards, normal(B, E, T) * mask, mask), k)


def test_the_first_state_has_no_metrics_and_all_counters_at_zero():
    update = first()
    assert update.metrics == {}
    assert update.learner.extra[ENV_STEPS] == update.learner.extra[ENV_STEPS_NOMINAL] == 0
    assert update.learner.params["weight"].tolist() == [3, 3]


def test_a_warm_start_takes_the_parameters_of_another_state_that_fit():
    extra = {"count": np.array(7), "critic.weight": np.ones(2)}  # this run has no critic
    start = LearnerState({"weight": np.zeros(2, np.float32)}, {"moment": np.ones(2)}, extra)
    update = first(start)
    assert update.learner.params["weight"].tolist() == [0, 0]
    assert set(update.learner.extra) == {ENV_STEPS, ENV_STEPS_NOMINAL}
    with pytest.raises(ConfigError, match=r"policy parameter weight has shape \(3,\) there; expected \(2,\)"):
        first(LearnerState({"weight": np.zeros(3, np.float32)}, {}, {}))
    with pytest.raises(ConfigError, match=r"policy parameter weight has shape None there; expected \(2,\)"):
        first(LearnerState({}, {}, {}))


def test_a_warm_start_takes_the_critic_and_the_normalization_that_this_run_has_too():
    class Judging(Counting):
        def initialize(self, *, run_seed):
            params = {"weight": np.zeros(2, np.float32)}
            return LearnerState(
                params, {}, {"critic.w": np.zeros(3), "normalization.mean": np.zeros(1), "count": np.zeros(1)}
            )

    extra = {"critic.w": np.full(3, 5.0), "normalization.mean": np.full(1, 6.0), "count": np.full(1, 7.0)}
    start = LearnerState({"weight": np.ones(2, np.float32)}, {}, extra)
    state = initialize(Judging(), At(3, 0), lambda: start).learner
    assert state.params["weight"].tolist() == [1, 1]
    assert [state.extra[name][0] for name in extra] == [5, 6, 0]


def test_meta_optimize_counts_actual_and_nominal_steps_over_iterations(steps):
    update = first()
    for iteration in range(2):
        update = learned(update, steps, iteration)
        state = update.learner
        assert update.metrics[ENV_STEPS] == state.extra[ENV_STEPS] == 2 * LENGTHS.sum() * (iteration + 1)
        assert update.metrics[ENV_STEPS_NOMINAL] == 2 * B * E * T * (iteration + 1)
    assert state.params["weight"].tolist() == [4, 4]


def test_metrics_describe_every_inner_step_and_the_update(steps):
    metrics = learned(first(), steps, 0).metrics
    for k in range(2):
        expected = steps[k].episodes.episode_returns.mean()
        assert metrics[f"step_{k}.average_return"] == pytest.approx(expected)
    assert metrics["shown"] == 2
    assert all(type(value) is float and np.isfinite(value) for value in metrics.values())


def test_update_counts_what_filled_the_buffer_and_describes_episodes_by_posterior(steps, updated):
    prior, posterior = (step.episodes for step in steps)
    update = updated(LEARNER, first(), (prior, posterior), 1, fill=prior)
    assert update.metrics[ENV_STEPS] == 3 * LENGTHS.sum()
    assert update.metrics["step_1.average_return"] == pytest.approx(posterior.episode_returns.mean())
    assert update.learner.params["weight"].tolist() == [4, 4]


class Odd(Counting):
    """Returns what it is told to."""

    def __init__(self, params, metrics):
        self.returned = LearnerState(params, {}, {}), metrics

    def update(self, state, experience, *, run_seed, iteration, parallel=map):
        return self.returned


@pytest.mark.parametrize(
    ("params", "metrics", "told"),
    [
        ({"weight": np.zeros(2)}, {}, r"params\['weight'\] as float64\[2\]; expected float32\[2\]"),
        ({"weight": np.zeros(3, np.float32)}, {}, r"as float32\[3\]; expected float32\[2\]"),
        ({}, {}, r"as absent; expected float32\[2\]"),
        ({"weight": np.zeros(2, np.float32)}, {ENV_STEPS: -1.0}, "the metrics env_steps, which every run already has"),
        ({"weight": np.zeros(2, np.float32)}, {"step_0.average_return": 9.0}, "metrics step_0.average_return"),
        ({name: np.zeros(1, np.float32) for name in "hgfedcba"}, {}, r"params\['a'\] as float32\[1\]; expected absent"),
        (
            {"weight": np.zeros(2, np.float32)},
            dict.fromkeys(("step_1.average_return", "step_0.average_return", ENV_STEPS_NOMINAL, ENV_STEPS), 1.0),
            "metrics env_steps, env_steps_nominal, step_0.average_return, step_1.average_return, which",
        ),
    ],
)
def test_an_update_that_no_run_could_go_on_with_or_that_hides_metrics_is_refused(steps, updated, params, metrics, told):
    with pytest.raises(StageFault, match=told):
        learned(first(), steps, 0, Odd(params, metrics))
    with pytest.raises(StageFault, match=told):
        updated(Odd(params, metrics), first(), tuple(step.episodes for step in steps), 0)


PER_TASK = TaskParams({"weight": np.zeros((B, 2), np.float32)})


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (PER_TASK.params, r":Counting.adapt\(\) returned dict; expected TaskParams for 3 tasks"),
        (
            TaskParams({"weight": np.zeros((2, 2), np.float32)}),
            r"returned params\['weight'\] for 2 tasks; expected .* for 3 tasks",
        ),
        (
            TaskParams({"weight": np.zeros((B, 3), np.float32)}),
            r"returned params\['weight'\] as \[3, 3\]; expected \[3, 2\]",
        ),
        (TaskParams({}), r"returned params\['weight'\] as absent; expected \[3, 2\]"),
    ],
)
def test_parameters_that_the_tasks_cannot_act_with_are_refused(found, told):
    with pytest.raises(StageFault, match=told):
        require_params(found, B, LEARNER, "adapt", PER_TASK)
    other = TaskParams({"other": np.zeros((B, 1), np.float32)})
    assert require_params(other, B, LEARNER, "adapt") is other
    assert require_params(PER_TASK, B, LEARNER, "adapt", PER_TASK) is PER_TASK


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({}, r":Counting.at_start\(\) returned dict; expected LearnerState\(params, optimizer, extra\)"),
        (LearnerState({"weight": [1.0]}), r"returned params\['weight'\] as list; expected a NumPy array"),
        (LearnerState({}, {}, {"count": 1}), r"returned extra\['count'\] as int; expected a NumPy array"),
        (LearnerState({"weight": np.zeros(2)}), r"params\['weight'\] as float64; expected float32"),
        (LearnerState({"index": np.zeros(2, np.float32)}), r"params\['index'\] as float32; expected int64"),
    ],
)
def test_a_state_that_no_run_could_store_is_refused(found, told):
    like = {"index": np.zeros(2, np.int64)}
    with pytest.raises(StageFault, match=told):
        require_state(found, LEARNER, "at_start", like)
    for sound in (LearnerState({"weight": np.zeros(2, np.float32)}, {"moment": np.ones(2)}), LearnerState(like)):
        assert require_state(sound, LEARNER, "at_start", like) is sound
    doubles = LearnerState({"weight": np.zeros(2)})
    assert require_state(doubles, LEARNER, "at_start") is doubles


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({5: 1.0}, r"returned a metric named 5; expected a string"),
        ({"loss": "low"}, "returned the metric 'loss' as 'low'; expected one number"),
        ({"loss": np.zeros(2)}, r"returned the metric 'loss' as array\(\[0., 0.\]\); expected one number"),
        ({"loss": np.array("low")}, "returned the metric 'loss' as array.*; expected one number"),
        ({"loss": None}, "returned the metric 'loss' as None; expected one number"),
    ],
)
def test_metrics_that_are_no_numbers_with_names_are_refused(steps, metrics, told):
    with pytest.raises(StageFault, match=told):
        learned(first(), steps, 0, Odd({"weight": np.zeros(2, np.float32)}, metrics))


def test_metrics_may_be_numbers_of_any_kind(steps):
    metrics = {"a": 1, "b": np.float32(2), "c": np.array(3), "d": True}
    found = learned(first(), steps, 0, Odd({"weight": np.zeros(2, np.float32)}, metrics)).metrics
    assert [found[name] for name in "abcd"] == [1.0, 2.0, 3.0, 1.0]


@pytest.mark.parametrize("lost", ["metrics", "extra"])
def test_an_iteration_that_loses_a_counter_is_refused(lost):
    counters = {ENV_STEPS: np.array(1), ENV_STEPS_NOMINAL: np.array(2)}
    metrics = {name: float(count) for name, count in counters.items()}
    require_complete(Update(LearnerState({}, {}, counters), metrics), first(), "iteration 3")
    del (metrics if lost == "metrics" else counters)[ENV_STEPS_NOMINAL]
    with pytest.raises(StageFault, match="iteration 3: the stage lost the counter env_steps_nominal"):
        require_complete(Update(LearnerState({}, {}, counters), metrics), first(), "iteration 3")


@pytest.mark.parametrize("part", ["optimizer", "extra"])
def test_an_iteration_that_loses_an_array_of_the_state_is_refused(steps, part):
    before, after = first(), learned(first(), steps, 0)
    getattr(before.learner, part)["moment"] = np.ones(2)
    told = rf"iteration 3: the update returned no {part}\['moment'\], which the previous state has"
    with pytest.raises(StageFault, match=told):
        require_complete(after, before, "iteration 3")


class Adapting(Counting):
    """Adapts to the parameters it is told, or adds one per step of the task's episodes."""

    def __init__(self, params=None):
        self.returned = params

    def adapt(self, state, params, evidence, *, parallel=map):
        of_task = 1 + np.arange(B, dtype=np.float32)[:, None]
        weight = params.params["weight"] + (of_task if isinstance(evidence, Step) else -of_task)
        return TaskParams({"weight": weight} if self.returned is None else self.returned)


def adapted(learner, steps, params, **changes):
    inputs = {"state": first(), "params": params, "episodes": steps[0].episodes, "samples": steps[0].samples}
    return adapt(learner, At(3, 0, step=0), map, **(inputs | changes))


def test_the_first_inner_step_adapts_the_learners_parameters_and_the_next_the_tasks_own(steps):
    once = adapted(Adapting(), steps, first())
    assert once.params["weight"].tolist() == [[4, 4], [5, 5], [6, 6]]
    assert adapted(Adapting(), steps, once).params["weight"].tolist() == [[5, 5], [7, 7], [9, 9]]
    assert adapted(Adapting(), steps, first(), samples=None).params["weight"].tolist() == [[2, 2], [1, 1], [0, 0]]


def test_an_inner_step_keeps_the_shapes_of_parameters_and_a_memory_may_have_others(steps):
    wrong = {"weight": np.zeros((B, 5), np.float32)}
    with pytest.raises(StageFault, match=r"returned params\['weight'\] as \[3, 5\]; expected \[3, 2\], as before"):
        adapted(Adapting(wrong), steps, first())
    with pytest.raises(StageFault, match=r"params\['weight'\] as absent; expected \[3, 2\]"):
        adapted(Adapting({}), steps, first())
    assert adapted(Adapting(wrong), steps, first(), samples=None).params["weight"].shape == (B, 5)
    with pytest.raises(StageFault, match=r"params\['weight'\] for 2 tasks; expected TaskParams for 3 tasks"):
        adapted(Adapting({"weight": np.zeros((2, 2), np.float32)}), steps, first(), samples=None)
