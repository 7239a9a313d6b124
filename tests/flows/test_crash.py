"""`kill -9` at any moment costs time, never data: real processes, real kills."""

import multiprocessing
import random
import sys
import time

import pytest

from metaloom import storage
from metaloom.flows.commands.train import resume, train
from metaloom.flows.rollouts.workers import Backend

SERIAL = Backend(workers=0)


@pytest.fixture(autouse=True)
def found_by_processes(monkeypatch, pytestconfig):
    """Processes that are started import this file by its name, from the project's root."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(pytestconfig.rootpath)])


def start(target, *arguments):
    """A process that has already imported what it needs, so that it dies while it works and not while it starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["metaloom.flows.commands.train"])
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def train_in_this_process(config, path):
    train(config, path, backend=SERIAL)


def resume_in_this_process(path):
    resume(path, backend=SERIAL)


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.sweep)])
def test_a_run_killed_at_random_moments_and_resumed_has_the_digests_of_an_uninterrupted_one(
    tmp_path, tiny_config, digests, kills
):
    normalizes = {"hidden_sizes": [8, 8], "normalize_observations": True}
    config = tiny_config(iterations=10, policy=normalizes, processing={"scale_rewards": True})
    began = time.perf_counter()
    train(config, tmp_path / "whole", backend=SERIAL)
    duration = time.perf_counter() - began
    expected = digests(tmp_path / "whole")
    moments = random.Random(0)
    stages_when_killed = []
    for attempt in range(kills):
        path = tmp_path / f"killed-{attempt}"
        process = start(train_in_this_process, config, path)
        _wait_for(lambda path=path: (path / "run.json").exists())
        time.sleep(moments.uniform(0, 0.8 * duration))
        process.kill()
        process.join()
        stages_when_killed.append(len(list(storage.open_run(path).refs())))
        resume(path, backend=SERIAL)
        assert digests(path) == expected, f"killed after {stages_when_killed[-1]} stages"
        assert storage.verify_run(path) == []
    assert len(set(stages_when_killed)) > kills // 4, f"the kills hit few different moments: {stages_when_killed}"


@pytest.mark.slow
def test_a_run_killed_again_and_again_while_it_resumes_still_ends_with_the_same_digests(tmp_path, tiny_config, digests):
    config = tiny_config(iterations=6)
    train(config, tmp_path / "whole", backend=SERIAL)
    path = tmp_path / "killed"
    process = start(train_in_this_process, config, path)
    _wait_for(lambda: (path / "run.json").exists())
    for _ in range(4):
        stored = len(list(storage.open_run(path).refs()))
        _wait_for(lambda stored=stored: len(list(storage.open_run(path).refs())) > stored)
        process.kill()
        process.join()
        process = start(resume_in_this_process, path)
    process.join()
    assert digests(path) == digests(tmp_path / "whole")


def _wait_for(condition, seconds=300.0):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("what the test waited for did not happen")
        time.sleep(0.002)
