"""SIGKILL at the write operations of a run that adapts by memory: trials are resumed whole, or sampled again."""

import pytest

from metaloom import storage

RL2 = {
    "env": {"name": "bernoulli-bandit"},
    "algorithm": {"name": "rl2", "episodes_per_trial": 2, "num_epochs": 1},
    "policy": {"network": "gru", "hidden_sizes": [4]},
    "num_tasks": 2,
    "episodes_per_task": 4,
    "max_episode_steps": 3,
    "iterations": 2,
}
STRIDE = 151  # a prime, so that the sample meets every kind of operation


@pytest.fixture(scope="module")
def points(tmp_path_factory, write_points, train_tiny):
    """Every write operation of the run, by name, in order; and where that run is."""
    names, path = [], tmp_path_factory.mktemp("counted") / "run"
    with write_points.before_each_write(lambda n, name, arguments: names.append(name)):
        train_tiny(path, **RL2)
    return names, path


@pytest.fixture
def kill_and_resume(tmp_path, killer, finish, digests, points):
    """Kills a run at a point, resumes it and compares it with one that nothing disturbed."""
    expected = digests(points[1])

    def check(point, *, torn=False):
        path = tmp_path / f"{point}-{torn}"
        assert killer.train(path, point, torn=torn, **RL2) == -9
        if (path / "run.json").exists():
            assert storage.verify_run(path) == [], f"killed at {point}"
            assert digests(path).items() <= expected.items(), f"killed at {point}"
        finish(path, **RL2)
        assert digests(path) == expected, f"killed at {point}"
        assert storage.verify_run(path) == [], f"killed at {point}"

    return check


@pytest.mark.slow
def test_a_run_killed_at_any_of_a_sample_of_writes_resumes_to_equal_digests(points, kill_and_resume):
    names, _ = points
    assert len(names) > 300
    for point in range(0, len(names), STRIDE):
        kill_and_resume(point)


@pytest.mark.sweep
@pytest.mark.timeout(0)
def test_a_run_killed_before_and_in_the_middle_of_every_write_resumes_to_equal_digests(points, kill_and_resume):
    for point, operation in enumerate(points[0]):
        kill_and_resume(point)
        if operation == "write":
            kill_and_resume(point, torn=True)
