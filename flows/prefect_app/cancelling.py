"""How a flow run ends that is asked to: behind its current stage, as after Ctrl-C, unless that takes too long."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Timer, current_thread, main_thread
from types import FrameType
from typing import Any
from uuid import UUID

from prefect import get_client, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Cancelled

from metaloom.flows.prefect_app.flow_runs import STAGE_SECONDS


@dataclass
class StopRequest:
    """Whether somebody has asked this process to end, by SIGTERM as Prefect does.

    Attributes:
        received: somebody has.
        before: Prefect's own handler.
    """

    received: bool = False
    before: Any = None
    _is_late: bool = False
    _timer: Timer | None = None

    def heard(self, number: int, frame: FrameType | None) -> None:
        """Take the signal; the one that comes when the stage takes too long goes to Prefect, which breaks it off."""
        if self._is_late:
            self.before(number, frame)
        elif not self.received:
            self.received = True
            self._timer = Timer(STAGE_SECONDS, self._break_off)
            self._timer.daemon = True
            self._timer.start()

    def _break_off(self) -> None:
        self._is_late = True
        os.kill(os.getpid(), signal.SIGTERM)

    def outcome(self, done: str) -> State:
        """Return the state of the flow run, which has stopped behind a stage because it was cancelled.

        Where it was not, as when its worker ends or the machine goes down, Prefect gets the signal after all: the flow
        run is Crashed then, and goes on elsewhere.
        """
        if self._timer is not None:
            self._timer.cancel()
        if not _is_cancelling():
            self.before(signal.SIGTERM, None)
        return Cancelled(message=f"cancelled after {done}")


@contextmanager
def finishing_the_stage() -> Iterator[StopRequest]:
    """Yield what tells whether the flow run is asked to end."""
    asked = StopRequest()
    if current_thread() is not main_thread():  # a flow that is called from a thread; signals are for its caller
        yield asked
        return
    asked.before = signal.signal(signal.SIGTERM, asked.heard)
    try:
        yield asked
    finally:
        # Once asked, Prefect need not hear it again, and would take it for a crash while it tells how the run ended.
        if not asked.received:
            signal.signal(signal.SIGTERM, asked.before)


def _is_cancelling() -> bool:
    # Without an answer it counts as not: a flow run that is cancelled all the same is not started again.
    with suppress(Exception), get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(flow_run.get_id())).state
        return state is not None and (state.is_cancelling() or state.is_cancelled())
    get_run_logger().warning("Prefect's server does not tell whether this flow run is cancelled")
    return False
