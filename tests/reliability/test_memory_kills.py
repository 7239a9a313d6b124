"""SIGKILL at the write operations of a run that adapts by memory: trials are resumed whole, or sampled again."""

import pytest

from metaloom import storage

SMALL = {
    "env": {"name": "bernoulli-bandit"},
    "num_tasks": 2,
    "episodes_per_task": 4,
    "max_episode_steps": 3,
    "iterations": 2,
}
RUNS = {
    "rl2": SMALL
    | {
        "algorithm": {"name": "rl2", "episodes_per_trial": 2, "num_epochs": 1},
        "policy": {"network": "gru", "hidden_sizes": [4]},
    },
    "rl2-trpo": SMALL
    | {
        "algorithm": {"name": "rl2-trpo", "episodes_per_trial": 2},
        "policy": {"network": "gru", "hidden_sizes": [4]},
    },
    "recurrent-ppo": {
        "env": {"name": "CartPole-v1", "observed": [0, 2]},
        "algorithm": {"name": "recurrent-ppo", "num_epochs": 1},
        "policy": {"network": "gru", "hidden_sizes": [4]},
        "num_tasks": 1,
        "episodes_per_task": 4,
        "max_episode_steps": 3,
        "iterations": 2,
    },
    # Its second update reads trials of the first iteration from the store.
    "varibad": SMALL
    | {
        "algorithm": {
            "name": "varibad",
            "episodes_per_trial": 2,
            "num_epochs": 1,
            "encoder_size": 4,
            "embedding_size": 4,
            "decoder_layers": [4],
            "critic_hidden_sizes": [4],
            "model_updates": 1,
        },
        "policy": {"hidden_sizes": [4]},
    },
}
STRIDE = 151  # a prime, so that the sample meets every kind of operation


@pytest.fixture(scope="module", params=RUNS)
def points(tmp_path_factory, write_points, train_tiny, request):
    """Every write operation of the run, by name, in order; where that run is, and its settings."""
    names, path = [], tmp_path_factory.mktemp("counted") / "run"
    with write_points.before_each_write(lambda n, name, arguments: names.append(name)):
        train_tiny(path, **RUNS[request.param])
    return names, path, RUNS[request.param]


@pytest.fixture
def kill_and_resume(tmp_path, killer, finish, digests, points):
    """Kills a run at a point, resumes it and compares it with one that nothing disturbed."""
    expected, settings = digests(points[1]), points[2]

    def check(point, *, torn=False):
        path = tmp_path / f"{point}-{torn}"
        assert killer.train(path, point, torn=torn, **settings) == -9
        if (path / "run.json").exists():
            assert storage.verify_run(path) == [], f"killed at {point}"
            assert digests(path).items() <= expected.items(), f"killed at {point}"
        finish(path, **settings)
        assert digests(path) == expected, f"killed at {point}"
        assert storage.verify_run(path) == [], f"killed at {point}"

    return check


@pytest.mark.slow
def test_a_run_killed_at_any_of_a_sample_of_writes_resumes_to_equal_digests(points, kill_and_resume):
    names = points[0]
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
