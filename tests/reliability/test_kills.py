"""SIGKILL at every write operation of a run, and at every one of its resumption (T1)."""

import shutil

import pytest

from metaloom import storage

ITERATIONS = 6
STRIDE = 199  # a prime, so that the sample meets every kind of operation


@pytest.fixture(scope="module")
def points(tmp_path_factory, write_points, train_tiny):
    """Every write operation of the run, by name, in order."""
    names, path = [], tmp_path_factory.mktemp("counted") / "run"
    with write_points.before_each_write(lambda n, name, arguments: names.append(name)):
        train_tiny(path, iterations=ITERATIONS)
    return names


def test_the_page_says_how_many_kills_are_tried(points, on_page):
    *counts, stride = on_page(
        "before each of the NUMBER write points of a six-iteration run, .* its NUMBER writes; .* every NUMBERth "
    )
    assert counts == pytest.approx([len(points), points.count("write")], rel=0.05)
    assert stride == STRIDE


@pytest.fixture
def kill_and_resume(tmp_path, killer, finish, digests, tiny_runs):
    """Kills a run at a point, checks what is left, resumes it and compares it with one that nothing disturbed."""
    expected = digests(tiny_runs(ITERATIONS))

    def check(point, torn):
        path = tmp_path / "run"
        assert killer.train(path, point, torn=torn, iterations=ITERATIONS) == -9
        if (path / "run.json").exists():
            assert storage.verify_run(path) == [], f"killed at {point}"
            assert digests(path).items() <= expected.items(), f"killed at {point}"
        finish(path, iterations=ITERATIONS)
        assert digests(path) == expected, f"killed at {point}"
        assert storage.verify_run(path) == [], f"killed at {point}"
        shutil.rmtree(path)

    return check


@pytest.mark.slow
@pytest.mark.no_cover
def test_a_run_killed_at_any_of_a_sample_of_writes_resumes_to_equal_digests(points, kill_and_resume):
    assert len(points) > 1500
    for point in range(0, len(points), STRIDE):
        kill_and_resume(point, torn=False)


@pytest.mark.slow
@pytest.mark.no_cover
def test_a_run_killed_in_the_middle_of_a_write_resumes_to_equal_digests(points, kill_and_resume):
    for point in [n for n, name in enumerate(points) if name == "write"][::STRIDE]:
        kill_and_resume(point, torn=True)


@pytest.mark.sweep
@pytest.mark.timeout(0)
def test_a_run_killed_before_and_in_the_middle_of_every_write_resumes_to_equal_digests(points, kill_and_resume):
    for point, name in enumerate(points):
        kill_and_resume(point, torn=False)
        if name == "write":
            kill_and_resume(point, torn=True)


@pytest.mark.slow
@pytest.mark.no_cover
def test_a_resumption_killed_at_any_of_its_first_writes_can_be_resumed(
    tmp_path, points, killer, finish, digests, tiny_runs
):
    whole = tmp_path / "killed"
    assert killer.train(whole, len(points) * 3 // 5, iterations=ITERATIONS) == -9
    expected, path = digests(tiny_runs(ITERATIONS)), tmp_path / "run"
    for point in range(0, 45, 5):
        shutil.copytree(whole, path)
        assert killer.operate("resume", path, point) == -9
        assert storage.verify_run(path) == [], f"killed at {point}"
        finish(path)
        assert digests(path) == expected, f"killed at {point}"
        shutil.rmtree(path)
