"""The laws of a run: the same bits everywhere, resumed from anywhere."""

import shutil
import threading
import time
from datetime import datetime

import psutil
import pytest

from metaloom import storage
from metaloom.flows.commands.train import resume, train
from metaloom.flows.observer import IterationReport, Observer
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.input import ConfigError
from metaloom.storage import StageRef

pytestmark = pytest.mark.usefixtures("warm")

SERIAL = Backend(workers=0)


@pytest.fixture
def reference(tmp_path, copy_tiny_run):
    return copy_tiny_run(tmp_path / "reference")


def test_a_run_stores_every_stage_of_every_iteration_in_order(reference):
    run = storage.open_run(reference)
    one_iteration = [
        ("sample_tasks", 0),
        ("collect_rollouts", 0),
        ("process_samples", 0),
        ("adapt", 0),
        ("collect_rollouts", 1),
        ("process_samples", 1),
        ("meta_optimize", 0),
    ]
    expected = [StageRef(0, "initialize", 0)]
    expected += [StageRef(i, stage, k) for i in range(3) for stage, k in one_iteration]
    assert list(run.refs()) == expected
    assert list(run.iterations) == [0, 1, 2]


def test_reports_tell_the_steps_of_an_iteration_and_the_time_that_it_took(tmp_path, tiny_config):
    reports, began, before = list[IterationReport](), time.perf_counter(), 0.0
    evaluation = {"every": 1, "num_tasks": 2, "episodes": 2, "test_episodes": 2}
    observer = Observer(iteration_done=reports.append)
    result = train(tiny_config(evaluation=evaluation), tmp_path / "run", backend=SERIAL, observer=observer)
    whole = time.perf_counter() - began
    assert result.computed == len(storage.open_run(tmp_path / "run").refs()) == 3 * 8 + 1
    assert [report.iteration for report in reports] == [0, 1, 2]
    for report in reports:
        evaluating = sum(time for stage, time in report.stage_seconds.items() if stage.startswith("evaluate"))
        assert report.steps == 4 * 3 * 10 * 2
        # Evaluations are no part of the time that the speed is told of.
        sampling = report.steps / report.steps_per_second
        assert 0 < sum(report.stage_seconds.values()) - evaluating <= sampling
        assert sampling + evaluating <= report.elapsed_seconds - before
        assert evaluating > 0
        before = report.elapsed_seconds
    assert before <= whole
    assert resume(tmp_path / "run", iterations=3, backend=SERIAL).computed == 0  # as many as are stored


def test_the_post_update_policy_is_the_adapted_one_and_not_the_learner(reference):
    run = storage.open_run(reference)
    before, after = run[1].rollouts(0), run[1].rollouts(1)
    adapted = run[1].adapted(0).params["log_std"]
    assert (after.behavior["log_std"] == adapted).all()
    assert not (before.behavior["log_std"] == adapted).all()


def test_two_runs_of_one_configuration_have_equal_digests(reference, tmp_path, tiny_config, digests):
    train(tiny_config(), tmp_path / "again", backend=Backend(workers=0, threads=2))
    assert digests(tmp_path / "again") == digests(reference)


def test_another_seed_changes_every_stage(reference, tmp_path, tiny_config, digests):
    train(tiny_config(seed=8), tmp_path / "other", backend=SERIAL)
    same = {name for name, digest in digests(tmp_path / "other").items() if digests(reference)[name] == digest}
    assert same == set()


@pytest.mark.no_cover
def test_a_run_that_lost_its_last_stages_is_completed_with_the_old_digests(reference, tmp_path, digests):
    records = sorted(reference.glob("_commits/*.json"), key=lambda file: storage.read_record(file).sequence)
    assert len(records) == 1 + 3 * 7
    for kept in range(len(records)):
        cut = tmp_path / f"cut-{kept}"
        shutil.copytree(reference, cut)
        for record in records[kept:]:
            (cut / record.relative_to(reference)).unlink()
        resume(cut, backend=SERIAL)
        assert digests(cut) == digests(reference), f"resumed after {kept} stages"


@pytest.mark.no_cover
def test_a_run_that_lost_any_one_stage_gets_it_back_with_the_old_digest(reference, tmp_path, digests):
    for ref in storage.open_run(reference).refs():
        holed = tmp_path / f"without-{ref.iteration}-{ref.stage}-{ref.step}"
        shutil.copytree(reference, holed)
        (holed / "_commits" / ref.file_name).unlink()
        assert ref not in storage.open_run(holed).refs()
        resume(holed, backend=SERIAL)
        assert digests(holed) == digests(reference), f"lost {ref}"
        assert storage.verify_run(holed) == []


def test_a_longer_run_starts_with_the_stages_of_the_shorter_one(reference, tmp_path, tiny_config, digests):
    before = digests(reference)
    assert resume(reference, iterations=5, backend=SERIAL).iterations_done == 5
    train(tiny_config(iterations=5), tmp_path / "longer", backend=SERIAL)
    assert digests(reference) == digests(tmp_path / "longer")
    assert before.items() <= digests(reference).items()


def test_fewer_iterations_than_are_stored_are_refused(reference):
    with pytest.raises(ConfigError, match="3 are already stored"):
        resume(reference, iterations=2, backend=SERIAL)


def test_the_reported_speed_counts_what_was_sampled_and_nothing_where_rollouts_were_stored(reference):
    reports: list[IterationReport] = []
    (reference / "_commits" / StageRef(2, "meta_optimize").file_name).unlink()
    began = time.perf_counter()
    resume(reference, iterations=4, backend=SERIAL, observer=Observer(iteration_done=reports.append))
    took = time.perf_counter() - began
    assert reports[0].steps_per_second is None
    sampled = 4 * 3 * 10 * 2
    assert sampled / took < (reports[1].steps_per_second or 0) < 1e6


def test_a_run_that_was_given_more_iterations_and_interrupted_remembers_them(reference):
    stop_at_once = Observer(should_stop=lambda: True)
    assert resume(reference, iterations=5, backend=SERIAL, observer=stop_at_once).stopped
    assert resume(reference, backend=SERIAL).iterations_done == 5


def test_a_run_that_is_asked_to_stop_keeps_the_stage_it_was_in_and_resumes(reference, tmp_path, tiny_config, digests):
    started: list[StageRef] = []
    observer = Observer(stage_started=started.append, should_stop=lambda: len(started) == 5)
    result = train(tiny_config(), tmp_path / "stopped", backend=SERIAL, observer=observer)
    assert result.stopped
    assert list(storage.open_run(tmp_path / "stopped").refs()) == started
    assert not resume(tmp_path / "stopped", backend=SERIAL).stopped
    assert digests(tmp_path / "stopped") == digests(reference)


def test_resuming_a_complete_run_computes_nothing(reference):
    started: list[StageRef] = []
    result = resume(reference, backend=SERIAL, observer=Observer(stage_started=started.append))
    assert (result.iterations_done, started) == (3, [])


@pytest.mark.parametrize("inner_steps", [0, 2])
def test_any_number_of_inner_steps_trains(tmp_path, tiny_config, inner_steps):
    algorithm = {"name": "promp", "inner_steps": inner_steps, "num_epochs": 1}
    train(tiny_config(algorithm=algorithm, iterations=1), tmp_path / "run", backend=SERIAL)
    stages = [ref.stage for ref in storage.open_run(tmp_path / "run").refs()]
    assert stages.count("adapt") == inner_steps
    assert stages.count("collect_rollouts") == inner_steps + 1


@pytest.fixture
def cheetah(tiny_config):
    return tiny_config(env="half-cheetah-dir", num_tasks=9, episodes_per_task=3, max_episode_steps=20)


@pytest.mark.dask
@pytest.mark.slow
def test_serial_and_any_number_of_dask_workers_give_equal_digests(tmp_path, cheetah, digests):
    train(cheetah, tmp_path / "serial", backend=SERIAL)
    for workers in (1, 4):
        train(cheetah, tmp_path / f"dask-{workers}", backend=Backend(workers=workers))
        assert digests(tmp_path / f"dask-{workers}") == digests(tmp_path / "serial"), f"{workers} workers"


@pytest.mark.dask
@pytest.mark.slow
def test_a_worker_killed_in_the_middle_of_a_rollout_changes_no_digest(tmp_path, tiny_config, digests):
    # Large enough that a rollout takes about a second, so that the kill lands in it.
    config = tiny_config(
        env="half-cheetah-dir", num_tasks=20, episodes_per_task=20, max_episode_steps=100, iterations=1
    )
    collected = StageRef(0, "collect_rollouts", 1)  # by workers that have started
    killed_at: list[float] = []

    def kill_a_worker() -> None:
        _busiest_worker().kill()
        killed_at.append(time.time())

    def watch(ref: StageRef) -> None:
        if ref == collected:
            threading.Timer(0.2, kill_a_worker).start()

    train(config, tmp_path / "serial", backend=SERIAL)
    train(config, tmp_path / "killed", backend=Backend(workers=2), observer=Observer(stage_started=watch))
    assert digests(tmp_path / "killed") == digests(tmp_path / "serial")
    rollout = storage.open_run(tmp_path / "killed").record(collected)
    began = datetime.fromisoformat(rollout.started).timestamp()
    assert began < killed_at[0] < began + rollout.seconds, "the kill missed the rollout, so this proves nothing"


def _busiest_worker() -> psutil.Process:
    """The Dask worker of this process that has computed most."""
    workers = [p for p in psutil.Process().children(recursive=True) if "spawn_main" in " ".join(p.cmdline())]
    return max(workers, key=lambda process: sum(process.cpu_times()[:2]))


def test_a_folder_that_holds_a_run_is_refused(reference, tiny_config):
    with pytest.raises(storage.RunExists):
        train(tiny_config(), reference, backend=SERIAL)


def test_a_run_records_the_environment_as_it_was_made_with_defaults(tmp_path, tiny_config):
    env = {"name": "half-cheetah-dir", "options": {}}
    train(tiny_config(env=env, iterations=1), tmp_path / "run", backend=SERIAL)
    run = storage.open_run(tmp_path / "run")
    assert run.info["environment"]["env"] == {
        "class": "metaloom.pipeline.envs.half_cheetah:HalfCheetahDir",
        "options": {"obs_style": "promp"},
        "observation_size": 17,
        "action_size": 6,
        "actions_taken": {"dtype": "float64", "low": [-1.0] * 6, "high": [1.0] * 6},
    }
    train(tiny_config(env={"name": "Pendulum-v1"}, iterations=1), tmp_path / "gymnasiums", backend=SERIAL)
    assert storage.open_run(tmp_path / "gymnasiums").info["environment"]["env"]["options"] == {"g": 10.0}


def test_a_run_trains_though_the_working_directory_is_gone(tmp_path, tiny_config, monkeypatch):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    train(tiny_config(iterations=1), tmp_path / "run", backend=Backend(workers=0))
    assert storage.verify_run(tmp_path / "run") == []
