"""A training as a loop over its iterations: the numbers of `train`, and a clean stop where the loop is left."""

import gc
import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import metaloom
from metaloom import storage
from metaloom.flows.errors import UsageError
from metaloom.pipeline.schema import ConfigError


def test_a_loop_yields_each_iteration_once_it_is_stored_and_computes_the_bits_of_train(
    tiny_config, tmp_path, copy_tiny_run, digests
):
    trained = copy_tiny_run(tmp_path / "trained")
    seen, dtype, left = [], torch.get_default_dtype(), np.geterr()
    for iteration in metaloom.iterate(tiny_config(), tmp_path / "looped"):
        assert iteration.metrics() == iteration.update().metrics == iteration.report.metrics
        assert iteration.rollouts(1).mean_returns.tolist() == iteration.report.task_returns[1].tolist()
        assert [iteration.run.record(ref).ref for ref in iteration.refs] == iteration.refs
        seen.append((iteration.index, len(iteration.run)))
        # What the loop changes in the process does not reach the stages.
        torch.manual_seed(0)
        random.seed(0)
        torch.set_default_dtype(torch.float64)
        np.seterr(all="raise")
    torch.set_default_dtype(dtype)
    np.seterr(**left)
    assert seen == [(0, 1), (1, 2), (2, 3)]
    assert digests(tmp_path / "looped") == digests(trained)


def test_two_loops_side_by_side_compute_the_same_bits(tiny_config, tmp_path, copy_tiny_run, digests):
    a, b = (metaloom.iterate(tiny_config(), tmp_path / name) for name in "ab")
    assert [one.index + other.index for one, other in zip(a, b, strict=True)] == [0, 2, 4]
    assert digests(tmp_path / "a") == digests(tmp_path / "b") == digests(copy_tiny_run(tmp_path / "trained"))


def test_a_loop_may_change_the_folder_that_it_is_in(tiny_config, tmp_path, monkeypatch, digests):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    for iteration in metaloom.iterate(tiny_config(iterations=2), Path("run")):
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert iteration.rollouts(0).lengths.all()
    monkeypatch.chdir(tmp_path)
    for _ in metaloom.iterate(storage.open_run(Path("run")), iterations=3):
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(metaloom.open_run(tmp_path / "run")) == 3


class Mine(Exception):
    """An error in the body of a loop."""


def leave_by_break(loop):
    for _ in loop:
        break


def leave_by_an_error(loop):
    with suppress(Mine):
        for _ in loop:
            raise Mine


def leave_by_closing(loop):
    next(loop)
    loop.close()


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_an_error, leave_by_closing])
def test_a_loop_that_is_left_stops_the_run_in_order_and_another_continues_it(tiny_config, tmp_path, digests, leave):
    path = tmp_path / "run"
    leave(metaloom.iterate(tiny_config(), path))
    gc.collect()
    run = metaloom.open_run(path)
    assert (len(run), storage.current_writer(path), metaloom.verify(run).intact) == (1, None, True)
    assert [line.message for line in metaloom.logs(run)][-1] == "stops at the request of this process"
    assert [iteration.index for iteration in metaloom.iterate(run, iterations=4)] == [1, 2, 3]
    whole = metaloom.train(tiny_config(iterations=4), tmp_path / "whole", progress=False)
    assert digests(path) == digests(whole.path)
    assert [*metaloom.iterate(run)] == []


def test_resume_continues_a_run_whose_loop_was_left(tiny_config, tmp_path, copy_tiny_run, digests):
    leave_by_break(metaloom.iterate(tiny_config(), tmp_path / "run"))
    metaloom.resume(tmp_path / "run", progress=False)
    assert digests(tmp_path / "run") == digests(copy_tiny_run(tmp_path / "trained"))


def test_a_loop_logs_as_train_does_and_leaving_it_is_no_failure_for_the_loggers(tiny_config, tmp_path, monkeypatch):
    closed = []

    class Logger:
        def __init__(self, run, folder): ...
        def iteration(self, report, ended): ...
        def film(self, file, report): ...
        def close(self, failed):
            closed.append(failed)

    monkeypatch.setattr("metaloom.flows.loggers.live.opener", lambda name: Logger)
    leave_by_break(metaloom.iterate(tiny_config(), tmp_path / "run", log=["tensorboard"]))
    assert closed == [False]


@pytest.mark.parametrize(
    ("call", "error", "found"),
    [
        (lambda run: metaloom.iterate("promp-point-corner", run), storage.RunExists, "there is a run"),
        (lambda run: metaloom.iterate("promp-point-cornr"), ConfigError, "did you mean promp-point-corner"),
        (lambda run: metaloom.iterate("promp-point-corner", nume_tasks=2), ConfigError, "nume_tasks: unknown key"),
        (
            lambda run: metaloom.iterate(metaloom.open_run(run), seed=2),
            UsageError,
            "--seed cannot be combined with an opened run",
        ),
        (
            lambda run: metaloom.iterate(metaloom.open_run(run), num_tasks=2),
            UsageError,
            "--num-tasks cannot be combined with an opened",
        ),
        (lambda run: metaloom.iterate("sac", log="wandb"), UsageError, r"write log=\['wandb'\]"),
    ],
)
def test_what_is_wrong_with_a_loop_is_said_before_its_first_iteration(call, error, found, tmp_path, copy_tiny_run):
    with pytest.raises(error, match=found):
        call(copy_tiny_run(tmp_path / "run"))
