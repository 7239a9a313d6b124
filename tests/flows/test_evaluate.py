import gc
import json
import weakref
from dataclasses import fields

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import metaloom.flows.rollouts.workers
from metaloom import storage
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import Observer, resume, train
from metaloom.flows.errors import UsageError
from metaloom.flows.operations.evaluate import evaluate
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.views.tables import evaluation_table
from metaloom.pipeline.building import build_learner
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.types import Evaluation, Step
from metaloom.stages.collect_rollouts import RolloutPosition
from metaloom.storage import StageRef

pytestmark = pytest.mark.usefixtures("warm")

SERIAL = Backend(workers=0)
EVERY_2 = {"every": 2, "num_tasks": 3, "adaptation_steps": 2, "episodes": 4, "test_episodes": 5}


def equal(left: Evaluation, right: Evaluation) -> bool:
    return all(np.array_equal(getattr(left, f.name), getattr(right, f.name)) for f in fields(Evaluation))


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tiny_config):
    # Targets and starting states of this environment are drawn from continuous distributions.
    folder = tmp_path_factory.mktemp("evaluate") / "plain"
    train(tiny_config(env="half-cheetah-vel", iterations=2), folder, backend=SERIAL)
    return folder


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, tiny_config):
    """A run of five iterations that was evaluated after the second and the fourth."""
    folder = tmp_path_factory.mktemp("evaluate") / "evaluated"
    train(tiny_config(iterations=5, evaluation=EVERY_2), folder, backend=SERIAL)
    return folder


@pytest.fixture
def collected(monkeypatch):
    """All episodes that are sampled: (position, episodes)."""
    found = []
    real = metaloom.flows.rollouts.workers.collect_shard

    def spy(spec, params, tasks, position):
        found.append((position, real(spec, params, tasks, position)))
        return found[-1][1]

    monkeypatch.setattr(metaloom.flows.rollouts.workers, "collect_shard", spy)
    return found


def starts(episodes) -> np.ndarray:
    return episodes.observations[:, :, 0].reshape(-1, episodes.observations.shape[-1])


def test_tasks_and_starts_are_none_of_those_of_training(plain, collected):
    outcome = evaluate(plain)
    assert outcome.tasks_are_new
    assert outcome.drawn_from is None
    assert "4 tasks that training never drew" in str(evaluation_table(outcome).title)
    for iteration in storage.open_run(plain):
        assert not np.isin(outcome.tasks.params, iteration.tasks().params).any()
        for k in range(2):
            trained = starts(iteration.rollouts(k))
            assert not any(np.isin(starts(episodes), trained).any() for _, episodes in collected)


def test_every_number_of_steps_has_episodes_of_its_own_to_adapt_to_and_others_to_be_tested_by(plain, collected):
    evaluate(plain, adaptation_steps=2, episodes=2, test_episodes=4)
    assert [episodes.lengths.shape[1] for _, episodes in collected] == [4, 2, 4, 2, 4]
    everything = np.concatenate([starts(episodes) for _, episodes in collected])
    assert len(np.unique(everything, axis=0)) == len(everything)


def test_adaptation_sees_the_adaptation_episodes_alone(plain, collected, monkeypatch):
    import metaloom.pipeline.algorithms.maml.learner

    seen = []
    real = metaloom.pipeline.algorithms.maml.learner.process_samples

    def spy(episodes, *rest, **options):
        seen.append(episodes)
        return real(episodes, *rest, **options)

    monkeypatch.setattr(metaloom.pipeline.algorithms.maml.learner, "process_samples", spy)
    evaluate(plain, adaptation_steps=2, episodes=2, test_episodes=4)
    assert [id(episodes) for episodes in seen] == [id(episodes) for _, episodes in collected[1::2]]
    assert all(episodes.lengths.shape[1] == 2 for episodes in seen)


def test_test_episodes_are_let_go_once_they_are_judged(plain, monkeypatch):
    made = []
    alive = []
    real = metaloom.flows.rollouts.workers.collect_shard

    def spy(*arguments):
        gc.collect()
        alive.append(tuple(sum(array() is not None for array in arrays) for arrays in zip(*made, strict=True)))
        episodes = real(*arguments)
        made.append((weakref.ref(episodes.observations), weakref.ref(episodes.behavior["mean"])))
        return episodes

    monkeypatch.setattr(metaloom.flows.rollouts.workers, "collect_shard", spy)
    gc.freeze()  # what there is already need not be looked through every time
    try:
        evaluate(plain, adaptation_steps=4)
    finally:
        gc.unfreeze()
    assert len(made) == 9
    # Observations of what was adapted to, which a later step may look at again, and not how it acted.
    assert alive[1:] == [(n, 0) for n in (0, 1, 1, 2, 2, 3, 3, 4)]


def test_an_adaptation_step_is_the_inner_step_of_training(plain, monkeypatch):
    acted = []
    real = metaloom.flows.rollouts.workers.collect_shard

    def spy(spec, params, tasks, position):
        acted.append((params, real(spec, params, tasks, position)))
        return acted[-1][1]

    monkeypatch.setattr(metaloom.flows.rollouts.workers, "collect_shard", spy)
    outcome = evaluate(plain, 1)
    learner = storage.open_run(plain)[0].update().learner
    (before, _), (adapting, episodes), (after, _) = acted
    for name, value in learner.params.items():
        assert np.array_equal(before.params[name], np.stack([value] * 4))
        assert np.array_equal(before.params[name], adapting.params[name])
    config = outcome.config
    _, algorithm, _ = build_learner(config)
    samples = algorithm.process(learner, episodes, seed=0)
    expected = algorithm.adapt(learner, before, Step(episodes, samples, 0))
    for name, value in expected.params.items():
        assert np.array_equal(after.params[name], value)
        assert not np.array_equal(after.params[name], before.params[name])


def test_what_test_episodes_give_changes_nothing_that_is_adapted(plain, monkeypatch):
    """Poisoned test rewards leave the adaptation episodes of every step as they were."""
    right = evaluate(plain, adaptation_steps=2).evaluation
    real = metaloom.flows.rollouts.workers.collect_shard

    def poisoned(spec, params, tasks, position: RolloutPosition):
        episodes = real(spec, params, tasks, position)
        if position.iteration == 1:  # where test episodes stand
            episodes.rewards[:] = 1e6
        return episodes

    monkeypatch.setattr(metaloom.flows.rollouts.workers, "collect_shard", poisoned)
    wrong = evaluate(plain, adaptation_steps=2).evaluation
    assert np.array_equal(right.adaptation_returns, wrong.adaptation_returns)
    assert not np.array_equal(right.test_returns, wrong.test_returns)


def test_the_figures_of_training_and_those_computed_later_are_equal_bit_for_bit(evaluated):
    run = storage.open_run(evaluated)
    assert [ref.iteration for ref in run.refs() if ref.stage == "evaluate"] == [1, 3]
    for iteration in (1, 3):
        outcome = evaluate(evaluated, iteration + 1)
        assert equal(outcome.evaluation, run[iteration].evaluation())
        assert storage.output_digest(storage.digest(outcome.evaluation)) == (
            run.record(StageRef(iteration, "evaluate")).digest
        )


@pytest.mark.dask
@pytest.mark.slow
def test_workers_do_not_change_an_evaluation(evaluated):
    there = evaluate(evaluated, 2, deterministic=True, backend=Backend(workers=2))
    assert equal(there.evaluation, evaluate(evaluated, 2, deterministic=True).evaluation)


def test_evaluating_changes_nothing_of_what_training_stores(evaluated, tiny_config, tmp_path, digests):
    train(tiny_config(iterations=5), tmp_path / "run", backend=SERIAL)
    with_evaluations = {name: digest for name, digest in digests(evaluated).items() if ".evaluate." not in name}
    assert with_evaluations == digests(tmp_path / "run")
    assert (
        storage.open_run(evaluated).info["config_digest"] == (storage.open_run(tmp_path / "run").info["config_digest"])
    )


def test_an_evaluation_counts_its_steps_apart(evaluated):
    run = storage.open_run(evaluated)
    assert run[3].evaluation().num_steps == 3 * 10 * (3 * 5 + 2 * 4)
    assert run[3].metrics()["env_steps"] == 4 * sum(run[0].rollouts(k).num_steps for k in range(2))
    assert evaluate(evaluated, 4).env_steps == run[3].evaluation().num_steps


def test_more_steps_prolong_the_curve_without_changing_it(evaluated):
    short, long = (evaluate(evaluated, adaptation_steps=k).evaluation for k in (1, 4))
    assert long.test_returns.shape == (3, 5, 5)
    assert np.array_equal(long.test_returns[:, :2], short.test_returns)
    assert np.array_equal(long.adaptation_returns[:, :1], short.adaptation_returns)


def test_whoever_watches_is_told_of_every_evaluation(tiny_config, tmp_path):
    reports = []
    config = tiny_config(iterations=3, evaluation=EVERY_2)
    train(config, tmp_path / "run", backend=SERIAL, observer=Observer(iteration_done=reports.append))
    stored = storage.open_run(tmp_path / "run")[1].evaluation()
    told = [list(report.evaluation_returns) for report in reports]
    assert told == [[], pytest.approx(stored.test_returns.mean(axis=(0, 2))), []]


def test_an_evaluation_is_replayed(evaluated):
    (outcome,) = replay(evaluated, 3, stage="evaluate")
    assert outcome.identical


def test_resuming_makes_the_evaluation_that_an_interruption_left_out(evaluated, tiny_config, tmp_path, digests):
    asked = []

    def just_before_the_first_evaluation() -> bool:
        asked.append(1)  # once per stage; an iteration has seven, the first one initializes as well
        return len(asked) > 8 + 7

    config = tiny_config(iterations=5, evaluation=EVERY_2)
    observer = Observer(should_stop=just_before_the_first_evaluation)
    train(config, tmp_path / "run", backend=SERIAL, observer=observer)
    interrupted = storage.open_run(tmp_path / "run")
    assert len(interrupted.iterations) == 2
    assert not interrupted.contains(StageRef(1, "evaluate"))
    resume(tmp_path / "run", backend=SERIAL)
    assert digests(tmp_path / "run") == digests(evaluated)


def test_the_table_has_every_episode(evaluated):
    run = storage.open_run(evaluated)
    frame = run.evaluations().to_pandas()
    assert set(frame["iteration"]) == {1, 3}
    assert (frame["updates"] == frame["iteration"] + 1).all()
    tests = frame[frame["test"] & (frame["iteration"] == 3)]
    stored = run[3].evaluation()
    assert np.array_equal(tests["return"].to_numpy().reshape(3, 3, 5), stored.test_returns)
    adapted = frame[~frame["test"] & (frame["iteration"] == 3)]
    assert np.array_equal(adapted["return"].to_numpy().reshape(3, 2, 4), stored.adaptation_returns)
    assert np.array_equal(tests["task_goal_x"].to_numpy()[:: 3 * 5], stored.task_params[:, 0])


def test_a_run_with_evaluations_is_whole(evaluated):
    assert storage.verify_run(evaluated) == []


def test_the_seed_draws_other_tasks_and_starts_and_the_same_one_the_same(plain):
    first, again, other = (evaluate(plain, seed=seed).evaluation for seed in (5, 5, 6))
    assert equal(first, again)
    assert not np.isin(first.task_params, other.task_params).any()
    assert not np.isin(first.test_returns, other.test_returns).any()


@pytest.mark.parametrize("seed", [-1, 2**63, 10**20])
def test_a_seed_that_no_run_can_have_is_refused(plain, seed):
    with pytest.raises(UsageError, match=r"an integer from 0 to 2\*\*63 - 1|expected an integer >= 0"):
        evaluate(plain, seed=seed)


def test_more_updates_than_the_run_has_are_refused_with_the_command_that_makes_them(plain):
    with pytest.raises(UsageError, match=r"the run has completed only 2.*--iterations 3"):
        evaluate(plain, 3)
    assert evaluate(plain, 2).updates == 2


def test_the_tasks_of_training_are_those_of_the_last_iteration(plain):
    outcome = evaluate(plain, tasks="train", num_tasks=None)
    run = storage.open_run(plain)
    assert np.array_equal(np.sort(outcome.tasks.params, axis=0), np.sort(run[1].tasks().params, axis=0))
    assert not outcome.tasks_are_new
    before_training = evaluate(plain, 0, tasks="train")
    assert np.array_equal(before_training.tasks.params, run[0].tasks().params)


def test_finitely_many_tasks_without_held_out_ones_are_drawn_in_turn(tiny_config, tmp_path):
    train(tiny_config(env="half-cheetah-dir", iterations=1), tmp_path / "run", backend=SERIAL)
    outcome = evaluate(tmp_path / "run")
    assert sorted(outcome.tasks.params[:, 0]) == [-1, -1, 1, 1]
    assert not outcome.tasks_are_new
    even = evaluate(tmp_path / "run", num_tasks=4, evenly_by="direction").tasks.params[:, 0]
    assert even.tolist() == [-1.0, 1.0, -1.0, 1.0]


@pytest.mark.parametrize("kind", ["json", "yaml", "fields", "parquet", "table"])
def test_tasks_come_from_a_file(plain, tmp_path, kind):
    name = {"fields": "tasks.json", "table": "tasks.parquet"}.get(kind, f"tasks.{kind}")
    path = tmp_path / name
    match kind:
        case "json":
            path.write_text("[[0.25], [1]]")
        case "yaml":
            path.write_text("- [0.25]\n- [1]\n")
        case "fields":
            path.write_text(json.dumps([{"velocity": 0.25}, {"velocity": 1.0}]))
        case "parquet":
            pq.write_table(pa.table({"velocity": [0.25, 1.0]}), path)
        case _:
            pq.write_table(pa.table({"iteration": [0, 0], "task_velocity": [0.25, 1.0]}), path)
    outcome = evaluate(plain, tasks=str(path))
    assert outcome.tasks.params.tolist() == [[0.25], [1.0]]
    assert outcome.tasks.ids.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("tasks.json", "[[0.25, 1]]", r"task 0 is \[0.25, 1\].*1 finite numbers \['velocity'\]"),
        ("tasks.json", '[{"speed": 1}]', r"task 0 has the fields \['speed'\]; expected \['velocity'\]"),
        ("tasks.json", "[]", "expected a non-empty list of tasks, got an empty list"),
        ("tasks.json", "{}", "expected a non-empty list of tasks, got dict"),
        ("tasks.json", "[[true]]", "task 0 is"),
        ("tasks.json", f"[[1{400 * '0'}]]", "expected 1 finite numbers"),
        ("tasks.yaml", "[[.nan]]", "task 0 is"),
        ("tasks.yaml", "[", "cannot read .* as tasks"),
        ("tasks.parquet", "no table", "cannot read .* as tasks"),
        ("tasks.txt", "", r"must be held-out, train, or a \.json"),
    ],
)
def test_a_file_without_tasks_of_the_environment_is_refused(plain, tmp_path, name, text, found):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=found):
        evaluate(plain, tasks=str(tmp_path / name))


def test_a_missing_file_is_refused_and_a_number_is_told_its_option(plain, tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .* as tasks"):
        evaluate(plain, tasks=str(tmp_path / "none.json"))
    with pytest.raises(UsageError, match="did you mean --num-tasks 4"):
        evaluate(plain, tasks="4")


def test_deterministic_test_episodes_take_the_mean_and_adaptation_episodes_explore(evaluated, collected):
    evaluate(evaluated, deterministic=True)
    means = [
        (position.iteration == 1, np.array_equal(episodes.actions, episodes.behavior["mean"]))
        for position, episodes in collected
    ]
    assert {*means} == {(True, True), (False, False)}


def test_a_run_without_adaptation_is_tested_as_it_is(tiny_config, tmp_path):
    config = tiny_config(algorithm={"name": "promp", "inner_steps": 0, "num_epochs": 1}, evaluation={"every": 3})
    train(config, tmp_path / "run", backend=SERIAL)
    outcome = evaluate(tmp_path / "run", test_episodes=20, num_tasks=1)
    assert outcome.evaluation.test_returns.shape == (1, 1, 20)
    assert len(outcome.summary()) == 1
    assert storage.open_run(tmp_path / "run")[2].evaluation().adaptation_returns.size == 0
    with pytest.raises(ConfigError, match="does not adapt"):
        evaluate(tmp_path / "run", adaptation_steps=1)


@pytest.mark.parametrize(
    ("env", "tasks", "found"),
    [
        ("point-corner", [[1.0]], r"shape \(1, 1\)"),
        ("hopper-rand-params", [[1.0] * 34, [0.0] * 34], "torso_mass of a task is 0.0"),
    ],
)
def test_tasks_that_do_not_fit_are_refused_before_a_run_is_created(tiny_config, tmp_path, env, tasks, found):
    config = tiny_config(env=env, evaluation={"tasks": tasks})  # checked even if no stage evaluates
    with pytest.raises(EnvError, match=found):
        train(config, tmp_path / "run", backend=SERIAL)
    assert not (tmp_path / "run").exists()
