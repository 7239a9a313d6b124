"""Runs of a sweep, also several at once, each in a process of its own, which ends with this one."""

import multiprocessing
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from threading import Thread

from metaloom.flows.commands.sweep_runs import Job, train_one_by_one, train_or_resume
from metaloom.flows.graph.warm_start import pinned
from metaloom.flows.loggers import LogPlan
from metaloom.flows.observer import IterationReport, Observer
from metaloom.flows.results.sweep import Ending, Outcome, SweepObserver
from metaloom.flows.rollouts.guard import tell_asked_to_end
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.signals import kept_from_children
from metaloom.flows.sweeps.stored import PlannedRun
from metaloom.pipeline.config.run import RunConfig

LOOK_SECONDS = 0.2
_FOR_ALL = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


@dataclass(frozen=True)
class _Working:
    """A process at work on a run, and the end of the pipe by which it tells of it."""

    run: PlannedRun
    process: ForkServerProcess
    told: Connection


def train_runs(
    jobs: Sequence[Job], parallel: int, backend: Backend, observer: SweepObserver, logs: LogPlan
) -> list[Outcome]:
    """Train runs, so many at a time; asked to stop, every one finishes its stage.

    Returns:
        How those ended that were begun.
    """
    if parallel == 1:
        return train_one_by_one(jobs, backend, observer, logs)
    # What depends on this process's folder and environment is settled here: others may have begun elsewhere.
    settled = [(run, pinned(config), folder.absolute()) for run, config, folder in jobs]
    return _train_at_once(settled, parallel, backend, observer, logs)


def _train_at_once(
    jobs: Sequence[Job], parallel: int, backend: Backend, observer: SweepObserver, logs: LogPlan
) -> list[Outcome]:
    context = multiprocessing.get_context("forkserver")
    # So that processes that follow need not import numerics again.
    context.set_forkserver_preload(["metaloom.flows.commands.train"])
    # From their first moment on, before they can say for themselves what signals mean.
    with kept_from_children(*_FOR_ALL):
        forkserver.ensure_running()
    stop, waiting, working = context.Event(), [*jobs], list[_Working]()
    outcomes: list[Outcome] = []
    try:
        while working or (waiting and not stop.is_set()):
            if observer.should_stop():
                stop.set()
            while waiting and len(working) < parallel and not stop.is_set():
                run, config, folder = waiting.pop(0)
                told, tell = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(config, folder, backend, stop, tell, logs), name=run.name)
                process.start()
                tell.close()  # else the end of the process would not end the pipe
                working.append(_Working(run, process, told))
                observer.begun(run)
            for told in wait([one.told for one in working], LOOK_SECONDS):
                one = next(one for one in working if one.told is told)
                ended = _listen(one, observer)
                if ended is not None:
                    working.remove(one)
                    outcomes.append(ended)
                    observer.ended(ended)
    finally:
        stop.set()
        for one in working:
            one.process.join()
    return outcomes


def _listen(one: _Working, observer: SweepObserver) -> Outcome | None:
    """Hear what a process has to tell; its outcome when that is the last."""
    try:
        message: IterationReport | tuple[Ending, str] = one.told.recv()
    except EOFError:
        one.process.join()
        return Outcome(
            one.run, "failed", f"its process ended with exit code {one.process.exitcode}; see `metaloom logs`"
        )
    if isinstance(message, IterationReport):
        observer.iteration_done(one.run, message)
        return None
    one.process.join()
    return Outcome(one.run, *message)


def _work(config: RunConfig, folder: Path, backend: Backend, stop: Event, tell: Connection, logs: LogPlan) -> None:
    """Train a run in this process, and tell of it."""
    for number in _FOR_ALL:
        # What this process starts ignores what it ignores, and is ended by SIGTERM.
        signal.signal(number, (lambda *_: None) if number == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_ALL)
    Thread(target=_end_with_parent, args=(stop,), daemon=True).start()

    def iteration_done(report: IterationReport) -> None:
        with suppress(BrokenPipeError):
            tell.send(report)

    observer = Observer(iteration_done=iteration_done, should_stop=stop.is_set)
    tell.send(train_or_resume(config, folder, backend, observer, logs))


def _end_with_parent(stop: Event) -> None:
    """End this process when the one that started it is gone, even by kill -9: what is committed is committed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    if stop.is_set():
        tell_asked_to_end()
    os._exit(1)
