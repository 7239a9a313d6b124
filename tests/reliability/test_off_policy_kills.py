"""SIGKILL at the write operations of runs whose replay memory is the store itself."""

import shutil

import pytest

from metaloom import storage

SAC = {
    "env": {"name": "Pendulum-v1", "action_scale": 1.0},
    "algorithm": {
        "name": "sac",
        "num_init_memory_steps": 8,
        "memory_size": 12,
        "batch_size": 3,
        "critic_hidden_sizes": [4],
    },
    "num_tasks": 1,
    "episodes_per_task": 1,
    "iterations": 3,
}
PEARL = {
    "env": {"name": "pearl-point-robot", "action_scale": 1.0},
    "algorithm": {
        "name": "pearl",
        "num_initial_steps": 4,
        "num_steps_prior": 4,
        "num_extra_rl_steps_posterior": 8,
        "num_updates": 2,
        "meta_batch_size": 2,
        "batch_size": 3,
        "embedding_batch_size": 3,
        "encoder_hidden_sizes": [4],
        "critic_hidden_sizes": [4],
        "latent_size": 2,
    },
    "num_tasks": 2,
    "episodes_per_task": 1,
    "iterations": 3,
}
RUNS = {"sac": SAC, "pearl": PEARL}
STRIDES = {"sac": 211, "pearl": 397}  # primes, so that the samples meet every kind of operation


@pytest.fixture(scope="module")
def expected(tmp_path_factory, train_tiny, digests):
    """Digests of uninterrupted runs."""
    return {name: digests(train_tiny(tmp_path_factory.mktemp(name) / "run", **RUNS[name])) for name in RUNS}


@pytest.fixture(scope="module")
def points(tmp_path_factory, write_points, train_tiny):
    """Every write operation of each run, by name, in order."""
    found = {}
    for run, settings in RUNS.items():
        names, path = [], tmp_path_factory.mktemp("counted") / "run"
        with write_points.before_each_write(lambda n, name, arguments, names=names: names.append(name)):
            train_tiny(path, **settings)
        found[run] = names
    return found


@pytest.fixture
def kill_and_resume(tmp_path, killer, finish, digests, expected):
    """Kills a run at a point, checks what is left, resumes it and compares it with one that nothing disturbed."""

    def check(name, point, *, torn=False):
        path = tmp_path / "run"
        assert killer.train(path, point, torn=torn, **RUNS[name]) == -9
        if (path / "run.json").exists():
            assert storage.verify_run(path) == [], f"killed at {point}"
            assert digests(path).items() <= expected[name].items(), f"killed at {point}"
        finish(path, **RUNS[name])
        assert digests(path) == expected[name], f"killed at {point}"
        assert storage.verify_run(path) == [], f"killed at {point}"
        shutil.rmtree(path)

    return check


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_at_any_of_a_sample_of_writes_resumes_to_equal_digests(points, kill_and_resume, name):
    assert len(points[name]) > 500
    for point in range(0, len(points[name]), STRIDES[name]):
        kill_and_resume(name, point)


@pytest.mark.sweep
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_before_and_in_the_middle_of_every_write_resumes_to_equal_digests(points, kill_and_resume, name):
    for point, operation in enumerate(points[name]):
        kill_and_resume(name, point)
        if operation == "write":
            kill_and_resume(name, point, torn=True)
