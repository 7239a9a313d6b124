"""Limit on what a run may hold on disk: a warning before it, and a stop that comes before a write would pass it."""

import logging
from pathlib import Path

from metaloom.storage.errors import BudgetReached
from metaloom.storage.format.codec import Value, flatten
from metaloom.storage.format.places import argument
from metaloom.storage.format.refs import StageRef

_LOG = logging.getLogger(__name__)
_WARN_AT = 0.9
_BESIDES_ARRAYS = 64 * 2**10  # a record, tables, checksums: more than they take at any size in use


class Budget:
    """Size of a run's files, against a limit. Not shared between threads: its owner has a lock.

    Args:
        root: folder of the run.
        limit: bytes that its files may hold.
        used: bytes that they hold.
    """

    def __init__(self, root: Path, limit: int, used: int) -> None:
        self._root = root
        self._limit = limit
        self._used = used
        self._reserved: dict[StageRef, int] = {}
        self._warned = False

    def reserve(self, ref: StageRef, value: Value) -> None:
        """Set aside what an output can take at most.

        Raises:
            BudgetReached: there is not so much left.
        """
        arrays = flatten(value).values()
        need = sum(array.nbytes for array in arrays) + _BESIDES_ARRAYS
        if self._used + sum(self._reserved.values()) + need > self._limit:
            raise self._reached(ref, need)
        self._reserved[ref] = need

    def release(self, ref: StageRef, written: int) -> None:
        """Count what an output took instead of what was set aside for it; negative when files went."""
        self._reserved.pop(ref, None)
        self._used += written
        if self._used > _WARN_AT * self._limit and not self._warned:
            self._warned = True
            share = self._used / self._limit
            _LOG.warning("%s holds %d bytes, %.0f %% of its limit", self._root, self._used, 100 * share)

    def _reached(self, ref: StageRef, need: int) -> BudgetReached:
        name = argument(self._root)
        return BudgetReached(
            self._root,
            found=f"{self._used} bytes, and up to {need} more to store {ref}",
            required=f"at most {self._limit} bytes (retention.max_bytes)",
            action=f"All that was committed is there. `metaloom thin {name} --keep-every 10` makes room for `metaloom "
            f"resume {name}`; `metaloom resume {name} --set retention.max_bytes=...` raises the limit",
        )
