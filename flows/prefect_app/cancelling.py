"""Stop a flow run on request: after its current stage, as after Ctrl-C, unless that takes too long."""

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
    """Request to end this process, by SIGTERM as Prefect sends it.

    Attributes:
        received: True once the request has come.
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
        """Return the state of the flow run, which has stopped after a stage because it was cancelled.

        If it was not cancelled, as when its worker ends or the machine goes down, Prefect gets the signal after all.
        The flow run is then Crashed, and continues elsewhere.
        """
        if self._timer is not None:
            self._timer.cancel()
        if not _is_cancelling():
            self.before(signal.SIGTERM, None)
        return Cancelled(message=f"cancelled after {done}")


@contextmanager
def finishing_the_stage() -> Iterator[StopRequest]:
    """Yield a `StopRequest` that shows whether the flow run is asked to end."""
    asked = StopRequest()
    if current_thread() is not main_thread():  # a flow that is called from a thread; signals are for its caller
        yield asked
        return
    asked.before = signal.signal(signal.SIGTERM, asked.heard)
    try:
        yield asked
    finally:
        # After a request, Prefect's handler stays off: it would take a second signal for a crash.
        if not asked.received:
            signal.signal(signal.SIGTERM, asked.before)


def _is_cancelling() -> bool:
    # Without an answer it counts as not: a flow run that is cancelled all the same is not started again.
    with suppress(Exception), get_client(sync_client=True) as client:
        state = client.read_flow_run(UUID(flow_run.get_id())).state
        return state is not None and (state.is_cancelling() or state.is_cancelled())
    get_run_logger().warning("Prefect's server does not answer whether this flow run is cancelled")
    return False
