"""How long a run waits for an object store, in one place: a deadline for every request, and a number of tries."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from metaloom.storage.errors import StorageFailed

TIMEOUT, TRIES = "METALOOM_STORE_TIMEOUT", "METALOOM_STORE_TRIES"
_SLOWEST_BYTES_PER_SECOND = 100_000
_FIRST_PAUSE_SECONDS = 0.5
# What may pass: named, because the packages that they are from are not imported for runs in folders.
_PASSING = {"HTTPClientError", "ConnectionError", "ClientConnectionError", "ClientPayloadError", "IncompleteRead"}
_SILENCE = ("ReadTimeoutError", "ConnectTimeoutError", "SocketTimeoutError", "ServerTimeoutError")
_FINAL = (FileNotFoundError, FileExistsError, PermissionError)
_REFUSED = range(400, 500)
_SLOW_DOWN = (408, 425, 429)

_log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Deadlines:
    """Limits of every request.

    Attributes:
        seconds: how long a store may be silent. All of an answer may take twice that, and what its bytes take at
            100 kB/s.
        tries: how often it is asked before the run stops.
    """

    seconds: float = 20.0
    tries: int = 5

    @classmethod
    def chosen(cls) -> "Deadlines":
        """What $METALOOM_STORE_TIMEOUT (seconds) and $METALOOM_STORE_TRIES say.

        Raises:
            StorageFailed: they are no such numbers.
        """
        return cls(_chosen(TIMEOUT, cls.seconds), int(_chosen(TRIES, cls.tries, at_least=1)))

    def of_transfer(self, num_bytes: int) -> float:
        """Seconds within which so many bytes must have been transferred, after a question about them and an answer."""
        return 2 * self.seconds + num_bytes / _SLOWEST_BYTES_PER_SECOND

    def ask(self, url: str, request: Callable[[], Answer]) -> Answer:
        """Make a request, and again while what it fails with may pass, with a warning each time.

        Raises:
            Exception: what it failed with the last time.
        """
        pause = _FIRST_PAUSE_SECONDS
        for n in range(2, self.tries + 1):
            try:
                return request()
            except Exception as error:
                if not may_pass(error):
                    raise
                _log.warning("%s: %s, trying again (%d of %d)", url, self.problem(error), n, self.tries)
            time.sleep(pause)
            pause *= 2
        return request()

    def problem(self, error: Exception) -> str:
        """What an error of a request means."""
        if type(error).__name__ in _SILENCE:
            return f"no answer for {self.seconds:g} s"
        if isinstance(error, TimeoutError):
            return "no complete answer in time"
        return f"{type(error).__name__}: {error}"


def may_pass(error: Exception) -> bool:
    """Tell if a request that failed so may succeed when it is made again."""
    if isinstance(error, _FINAL):
        return False
    if isinstance(error, OSError):
        return not _refusal(error.__cause__)
    return any(kind.__name__ in _PASSING for kind in type(error).__mro__)


def _refusal(answer: object) -> bool:
    """Tell if a store has answered that what it was asked is wrong."""
    response: dict[str, dict[str, int]] = getattr(answer, "response", {})
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status in _REFUSED and status not in _SLOW_DOWN


def _chosen(name: str, default: float, at_least: float = 0.001) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text or default)
    except ValueError:
        value = float("nan")
    if not at_least <= value <= 86_400:
        raise StorageFailed(
            f"${name}",
            found=repr(text),
            required=f"a number from {at_least:g} to 86400",
            action=f"Without it, it is {default:g}",
        )
    return value
