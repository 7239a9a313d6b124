"""DQL, SAC and PEARL through the store: the same bits however a run came about, and the store as replay buffer."""

import shutil
import warnings

import numpy as np
import pytest

from metaloom import storage
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.optimize import optimize
from metaloom.flows.commands.replay import debug_stage, replay
from metaloom.flows.commands.thin import materialise, thin
from metaloom.flows.commands.train import Observer, resume, train
from metaloom.flows.errors import UsageError
from metaloom.flows.operations.evaluate import evaluate
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.algorithms.contract import NumericalError
from metaloom.pipeline.config.input import ConfigError, override
from metaloom.pipeline.config.run import build_config
from metaloom.storage import Retention, StageRef
from metaloom.storage.read.committed import CommittedFiles

pytestmark = pytest.mark.usefixtures("warm")

HERE = Backend(workers=0)
SINGLE = ["iterations=3", "max_episode_steps=15", "policy.hidden_sizes=[8]", "algorithm.critic_hidden_sizes=[8]"]
MEMORY = ["algorithm.num_init_memory_steps=40", "algorithm.memory_size=70", "algorithm.batch_size=6"]
TINY = {
    "sac": [*SINGLE, *MEMORY, "env=Pendulum-v1", "evaluation.every=2", "evaluation.test_episodes=2"],
    "dql": [*SINGLE[:3], *MEMORY, "evaluation.every=2", "evaluation.test_episodes=2"],
    "pearl-sparse-point-robot": [
        *SINGLE,
        "max_episode_steps=5",
        "num_tasks=3",
        "algorithm.num_initial_steps=5",
        "algorithm.num_steps_prior=10",
        "algorithm.num_steps_posterior=10",
        "algorithm.num_extra_rl_steps_posterior=10",
        "algorithm.num_updates=3",
        "algorithm.meta_batch_size=4",
        "algorithm.batch_size=6",
        "algorithm.embedding_batch_size=5",
        "algorithm.encoder_hidden_sizes=[8]",
        "algorithm.num_exp_traj_eval=1",
        "algorithm.latent_size=2",
        "evaluation.every=2",
        "evaluation.adaptation_steps=2",
        "evaluation.num_tasks=3",
    ],
}
RECIPES = sorted(TINY)


def tiny(recipe, *changes):
    return build_config(override(load_settings(recipe), [*TINY[recipe], *changes]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Uninterrupted runs by recipe; not to be changed."""
    made = {}

    def get(recipe):
        if recipe not in made:
            made[recipe] = tmp_path_factory.mktemp(recipe) / "run"
            train(tiny(recipe), made[recipe], backend=HERE)
        return made[recipe]

    return get


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_is_replayed_and_verified_bit_for_bit(whole, recipe):
    outcomes = list(replay(whole(recipe)))
    assert {outcome.ref.stage for outcome in outcomes} >= {"fill_memory", "sample_transitions", "update", "evaluate"}
    assert all(outcome.identical for outcome in outcomes)
    assert all(outcome.identical for outcome in replay(whole(recipe), 1))  # without the iterations before
    assert storage.verify_run(whole(recipe)) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_records_name_all_that_was_collected_so_far_in_one_entry(whole, recipe):
    run = storage.open_run(whole(recipe))
    rounds = ("fill_memory", "collect_rollouts")
    for i in range(3):
        drawn, updated = (run.record(StageRef(i, stage)) for stage in ("sample_transitions", "update"))
        tasks = [("sample_tasks",)] if recipe.startswith("pearl") else []
        assert [item.stages for item in drawn.spans] == [rounds, *tasks]
        assert drawn.inputs == ()
        assert updated.spans == drawn.spans[:1]
        assert {item.ref.stage for item in updated.inputs} >= {"collect_rollouts", "sample_transitions"}
        refs = [ref for ref in run.refs() if ref in drawn.spans[0].span]
        assert drawn.spans[0].steps == sum(run.load(ref).num_steps for ref in refs)
        assert run[i].minibatches().rows.max() < drawn.spans[0].steps


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_stage_reads_of_a_span_what_it_says(whole, monkeypatch, recipe):
    """Lengths of all rounds to draw rows, tasks where each has a replay buffer, and the rounds of the rows drawn."""
    read, of = [], CommittedFiles.read_row

    def spy(files, record, chunk, *tasks):
        read.append((record.ref, chunk.array.partition("/")[2]))
        return of(files, record, chunk, *tasks)

    run = storage.open_run(whole(recipe))
    minibatches, record = run[2].minibatches(), run.record(StageRef(2, "sample_transitions"))
    parts = [part for part in (minibatches.rows, minibatches.context_rows) if part is not None]
    numbers = [part[: minibatches.num_updates].ravel() for part in parts]
    drawn = run.transitions(np.unique(np.concatenate(numbers))).select(["iteration", "stage", "step"]).to_pylist()
    monkeypatch.setattr(CommittedFiles, "read_row", spy)
    assert all(outcome.identical for outcome in replay(run.path, 2, stage="sample_transitions"))
    rounds = record.spans[0].span
    compared = {StageRef(2, "sample_transitions")}
    assert {ref for ref, _ in read} - compared == {
        ref for ref in run.refs() for item in record.spans if ref in item.span
    }
    assert {name for ref, name in read if ref in rounds} == {"lengths"}
    del read[:]
    assert all(outcome.identical for outcome in replay(run.path, 2, stage="update"))
    own = {ref for ref in run.refs() if ref in rounds and ref.iteration == 2}
    assert {ref for ref, name in read if name == "observations"} == {StageRef(**row) for row in drawn} | own
    assert {ref for ref, name in read if name.startswith("behavior")} <= own


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_that_stops_after_any_of_a_sample_of_stages_resumes_to_the_same_bits(whole, tmp_path, digests, recipe):
    expected = digests(whole(recipe))
    for stop in range(1, len(expected), len(expected) // 3):
        path, begun = tmp_path / str(stop), []
        observer = Observer(stage_started=begun.append, should_stop=lambda begun=begun, stop=stop: len(begun) >= stop)
        train(tiny(recipe), path, backend=HERE, observer=observer)
        assert len(digests(path)) == stop
        resume(path, backend=HERE)
        assert digests(path) == expected, f"stopped after {stop} stages"


@pytest.mark.parametrize(
    "lost",
    [
        [StageRef(1, "collect_rollouts")],
        [StageRef(0, "fill_memory"), StageRef(2, "sample_transitions")],
        [StageRef(1, "sample_tasks"), StageRef(2, "collect_rollouts"), StageRef(2, "sample_transitions")],
    ],
    ids=["round", "fill", "tasks"],
)
@pytest.mark.parametrize("recipe", ["sac", "pearl-sparse-point-robot"])
def test_damaged_parts_of_the_replay_buffer_are_computed_again(whole, tmp_path, digests, recipe, lost):
    path = tmp_path / "run"
    shutil.copytree(whole(recipe), path)
    run = storage.open_run(path)
    for ref in lost:
        chunk = next(chunk for chunk in run.record(ref).chunks if chunk.size)
        (path / chunk.path).write_bytes(b"damaged")
    resume(path, repair=True, backend=HERE)
    assert storage.verify_run(path) == []
    assert digests(path) == digests(whole(recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cache_of_hardly_a_row_gives_the_same_bits(whole, tmp_path, digests, monkeypatch, recipe):
    monkeypatch.setattr("metaloom.stages.memory.replay.MIB", 40)  # bytes: hardly a row
    train(tiny(recipe), tmp_path / "run", backend=HERE)
    assert digests(tmp_path / "run") == digests(whole(recipe))


@pytest.mark.dask
@pytest.mark.parametrize(("recipe", "workers"), [("sac", 1), ("pearl-sparse-point-robot", 2)])
def test_workers_change_no_bit(whole, tmp_path, digests, recipe, workers):
    train(tiny(recipe), tmp_path / "run", backend=Backend(workers=workers))
    assert digests(tmp_path / "run") == digests(whole(recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_fork_goes_on_with_its_parents_replay_buffer(whole, tmp_path, digests, recipe):
    path = tmp_path / "same"
    fork(whole(recipe), 2, path)
    resume(path, backend=HERE)
    assert digests(path) == digests(whole(recipe))
    fork(whole(recipe), 2, tmp_path / "other", ["processing.discount=0.5"])
    resume(tmp_path / "other", backend=HERE)
    ours, theirs = (storage.open_run(p)[2].minibatches() for p in (tmp_path / "other", whole(recipe)))
    np.testing.assert_array_equal(ours.rows, theirs.rows)
    changed = storage.open_run(tmp_path / "other")[2].update().learner.params
    stored = storage.open_run(whole(recipe))[2].update().learner.params
    assert any((changed[name] != stored[name]).any() for name in stored)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_update_is_computed_again_under_other_settings(whole, recipe):
    assert optimize(whole(recipe), 1, stage="update").changed.identical
    changed = optimize(whole(recipe), 1, ["processing.discount=0.5"], stage="update")
    assert changed.stored.identical
    assert not changed.changed.identical
    fewer = optimize(whole(recipe), 1, ["algorithm.batch_size=2"], stage="update")
    assert not fewer.changed.identical
    assert (
        optimize(whole(recipe), 1, ["algorithm.batch_size=2"], stage="sample_transitions").changed.value.rows.shape[2]
        == 2
    )
    with pytest.raises(UsageError, match="samples; choose"):
        optimize(whole(recipe), 0, stage="fill_memory")


@pytest.mark.parametrize(
    ("recipe", "change", "message"),
    [
        ("sac", "algorithm.num_init_memory_steps=6", "algorithm.num_init_memory_steps affect sampling"),
        ("dql", "algorithm.eps_init=0.5", "algorithm.eps_init affect sampling"),
        ("pearl-sparse-point-robot", "algorithm.num_steps_prior=5", "algorithm.num_steps_prior affect sampling"),
        ("sac", "algorithm.name=promp", "algorithm.name=promp must have the same stages as the run's algorithm, sac"),
    ],
)
def test_an_update_is_not_computed_again_under_settings_that_decide_the_episodes(whole, recipe, change, message):
    with pytest.raises(UsageError, match=message):
        optimize(whole(recipe), 1, [change])


@pytest.mark.parametrize(
    ("recipe", "change"),
    [
        ("sac", "algorithm.batch_size=3"),
        ("dql", "algorithm.num_updates_per_step=3"),
        ("pearl-sparse-point-robot", "algorithm.num_updates=5"),
        ("pearl-sparse-point-robot", "algorithm.num_steps_posterior=5"),
    ],
)
def test_a_fork_whose_batches_would_not_fit_behind_its_parents_is_refused(whole, tmp_path, recipe, change):
    name, _, value = change.partition("=")
    with pytest.raises(ConfigError, match=f"{name} cannot change from .* to {value}"):
        fork(whole(recipe), 2, tmp_path / "fork", [change])
    assert not (tmp_path / "fork").exists()


def test_a_fork_does_not_learn_tasks_from_the_replay_buffers_of_others(whole, tmp_path):
    changes = ["env=pearl-point-robot", "algorithm.sparse_rewards=false"]
    with pytest.raises(
        ConfigError, match="pearl-point-robot has different training tasks than pearl-sparse-point-robot"
    ):
        fork(whole("pearl-sparse-point-robot"), 2, tmp_path / "fork", changes)


@pytest.mark.parametrize("recipe", RECIPES)
def test_thinning_takes_row_numbers_and_leaves_the_episodes(whole, tmp_path, digests, recipe):
    path = tmp_path / "run"
    train(tiny(recipe), path, backend=HERE)
    thin(path, Retention(keep_last=1))
    run = storage.open_run(path)
    assert run.is_thinned(StageRef(0, "sample_transitions"))
    assert run[0].rollouts(0).num_steps > 0
    assert debug_stage(path, 1, "update").identical
    assert debug_stage(path, 2, "sample_transitions").identical  # behind row numbers that were thinned
    resume(path, iterations=4, backend=HERE)  # reads the episodes
    assert all(outcome.identical for outcome in replay(path))
    assert [ref.stage for ref in materialise(path, 0)].count("sample_transitions") == 1
    assert storage.verify_run(path) == []
    assert digests(path).items() >= digests(whole(recipe)).items()


@pytest.mark.parametrize("recipe", RECIPES)
def test_evaluations_in_training_and_afterwards_are_equal(whole, recipe):
    stored = storage.open_run(whole(recipe))[1].evaluation()
    again = evaluate(whole(recipe), 2, backend=HERE).evaluation
    np.testing.assert_array_equal(stored.test_returns, again.test_returns)
    assert stored.test_returns.shape[1] == (3 if recipe.startswith("pearl") else 1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_warm_start_takes_what_judges_the_policy_too(whole, tmp_path, recipe):
    train(tiny(recipe, "iterations=1", f"init_from={whole(recipe)}"), tmp_path / "run", backend=HERE)
    old = storage.open_run(whole(recipe))[2].update().learner
    new = storage.open_run(tmp_path / "run").load(StageRef(0, "initialize")).learner
    judges = [name for name in new.extra if name.startswith(("q1.", "q2.", "v.", "target_"))]
    assert judges
    for name in judges:
        np.testing.assert_array_equal(new.extra[name], old.extra[name])
    for name in new.params:
        np.testing.assert_array_equal(new.params[name], old.params[name])
    assert not new.extra["num_updates"]


@pytest.mark.parametrize(("recipe", "behavior"), [("sac", {"mean", "log_stds"}), ("dql", {"action_values", "epsilon"})])
def test_a_trained_policy_fills_the_replay_buffer_where_asked(whole, tmp_path, recipe, behavior):
    changes = ["iterations=1", f"init_from={whole(recipe)}", "algorithm.use_trained_policy_for_refill=true"]
    train(tiny(recipe, *changes), tmp_path / "run", backend=HERE)
    fill = storage.open_run(tmp_path / "run")[0].memory_fill()
    assert fill.behavior.keys() == behavior
    if recipe == "dql":
        assert fill.behavior["epsilon"] == np.float32(0.05)
        greedy = fill.actions == fill.behavior["action_values"].argmax(axis=-1).reshape(fill.actions.shape)
        assert greedy[fill.mask > 0].mean() > 0.8


@pytest.mark.parametrize(
    ("recipe", "change"),
    [("sac", "algorithm.learning_rate=1e30"), ("pearl-sparse-point-robot", "algorithm.q_learning_rate=1e30")],
)
def test_an_update_that_diverges_is_told_once_and_kept(tmp_path, recipe, change):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NumPy's say less than the error
        with pytest.raises(NumericalError, match=r"are not finite after the update.*_quarantine"):
            train(tiny(recipe, change), tmp_path / "run", backend=HERE)
    assert [entry.ref for entry in storage.read_quarantine(tmp_path / "run")] == [StageRef(0, "update")]


def test_rows_are_of_the_newest_transitions_only(whole):
    run = storage.open_run(whole("sac"))
    steps = [run[0].memory_fill().num_steps, *(run[i].rollouts(0).num_steps for i in range(3))]
    for i in range(3):
        rows, total = run[i].minibatches().rows, sum(steps[: i + 2])
        assert rows.shape == (15, 1, 6)
        assert max(0, total - 70) <= rows.min() < rows.max() < total
    assert sum(steps[:4]) > 70  # so the ring went round


def test_environment_steps_count_the_fill(whole):
    run = storage.open_run(whole("sac"))
    collected = sum(run[i].rollouts(0).num_steps for i in range(3))
    assert run[2].metrics()["env_steps"] == run[0].memory_fill().num_steps + collected


def test_there_are_as_many_gradient_steps_as_environment_steps(whole):
    run = storage.open_run(whole("dql"))
    for i in range(3):
        assert run[i].minibatches().num_updates == run[i].rollouts(0).num_steps
    assert len({run[i].rollouts(0).num_steps for i in range(3)}) > 1


def test_the_context_is_of_what_was_collected_last(whole):
    run = storage.open_run(whole("pearl-sparse-point-robot"))
    ids = [run[i].tasks().ids for i in range(3)]
    assert all(len(set(chosen)) == 3 for chosen in ids)
    fill, per_iteration = 80 * 5, 3 * (2 + 1 + 1 + 1 + 1) * 5
    minibatches = run[2].minibatches()
    for task_ids, context in zip(minibatches.task_ids, minibatches.context_rows, strict=True):
        assert len(set(task_ids)) == 4
        for task_id, rows in zip(task_ids, context, strict=True):
            last = max((i for i in range(3) if task_id in ids[i]), default=None)
            first = 0 if last is None else fill + last * per_iteration
            stop = fill if last is None else first + 3 * (2 + 1 + 1) * 5  # what only the values learn from comes last
            assert first <= rows.min() <= rows.max() < stop


@pytest.mark.parametrize(
    ("recipe", "change", "message"),
    [
        ("sac", "num_tasks=2", r"num_tasks is 2 but sac learns one task; remove num_tasks"),
        ("sac", "baseline=linear_feature", r"remove baseline"),
        ("sac", "policy.init_std=0.5", r"policy: .*init_std.* applies to Gaussian policies only"),
        ("sac", "algorithm.use_trained_policy_for_refill=true", r"init_from names no run"),
        ("dql", "processing.gae_lambda=0.5", r"processing.gae_lambda is 0.5 but dql learns from single transitions"),
        ("pearl-sparse-point-robot", "episodes_per_task=2", r"episodes_per_task is 2 but pearl collects by steps"),
        ("pearl-sparse-point-robot", "min_steps=9", r"min_steps or min_rollouts is set"),
    ],
)
def test_settings_that_an_off_policy_algorithm_has_no_use_for_are_refused(recipe, change, message):
    with pytest.raises(ConfigError, match=message):
        tiny(recipe, change)


@pytest.mark.parametrize(
    ("recipe", "change", "message"),
    [
        ("sac", "env=CartPole-v1", r"sac, which is for continuous actions, but CartPole-v1 has 2 discrete ones"),
        ("dql", "env=Pendulum-v1", r"dql, which is for discrete actions, but Pendulum-v1 has continuous ones"),
        ("pearl-sparse-point-robot", "env=pearl-point-robot", r"sparse"),
        ("pearl-sparse-point-robot", "env=half-cheetah-vel", r"task_set"),
        ("pearl-sparse-point-robot", "algorithm.meta_batch_size=81", r"meta_batch_size is 81 but .* has 80 training"),
        ("pearl-sparse-point-robot", "num_tasks=81", r"num_tasks is 81 but .* has 80 training tasks"),
    ],
)
def test_environments_that_an_algorithm_cannot_act_in_are_refused_before_anything_is_stored(
    tmp_path, recipe, change, message
):
    with pytest.raises((ConfigError, ValueError), match=message):
        train(tiny(recipe, change), tmp_path / "run", backend=HERE)
    assert not (tmp_path / "run").exists()


TORCH = ["algorithm.kernel=torch", "policy.network=residual", "policy.activation=SiLU", "algorithm.optimizer=AdamW"]


@pytest.mark.parametrize("recipe", ["sac", "dql", "pearl-sparse-point-robot"])
def test_what_torch_computes_for_a_residual_network_is_replayed_and_resumed_to_the_bit(recipe, tmp_path):
    sizes = [] if recipe == "dql" else ["algorithm.critic_hidden_sizes=[8,8]"]
    sizes += ["algorithm.encoder_hidden_sizes=[8,8]"] if recipe.startswith("pearl") else []
    config = tiny(recipe, *TORCH, "policy.hidden_sizes=[8,8]", *sizes)
    train(config, tmp_path / "whole", backend=HERE)
    assert all(outcome.identical for outcome in replay(tmp_path / "whole"))
    train(config.model_copy(update={"iterations": 1}), tmp_path / "run", backend=HERE)
    resume(tmp_path / "run", iterations=config.iterations, backend=HERE)
    whole, run = (storage.open_run(tmp_path / name) for name in ("whole", "run"))
    assert {ref: whole.record(ref).digest for ref in whole.refs()} == {
        ref: run.record(ref).digest for ref in run.refs()
    }
