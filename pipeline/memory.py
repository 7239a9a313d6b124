"""Available memory, and a check that networks fit into it."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

from metaloom.pipeline.schema import ConfigError

_PARAMETER_BYTES = 4 * 4  # at least a gradient and two moments per parameter
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_memory() -> int:
    """Return the memory limit of this process in bytes: the machine's memory, or a lower control group limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for file in _CGROUP_LIMITS if (limit := _limit(Path(file))) is not None)])


def require_room(shapes: Mapping[str, tuple[int, ...]], *, setting: str) -> None:
    """Raise ConfigError if training a network with these parameter shapes would exceed this machine's memory."""
    needed = _PARAMETER_BYTES * sum(map(math.prod, shapes.values()))
    if needed > (memory := machine_memory()):
        largest = max(shapes, key=lambda name: math.prod(shapes[name]))
        raise ConfigError(
            f"{setting}: training this network takes at least {needed / 1e9:,.1f} GB of memory ({largest} has "
            f"the shape {shapes[largest]}), but this machine has {memory / 1e9:,.1f} GB; "
            "make its layers smaller"
        )


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:  # not in such a control group
        return None
    return int(text) if text.isdecimal() else None
