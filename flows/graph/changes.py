"""Changes in plug-in sources, the processor and its arithmetic since a stored output was computed."""

import logging
from collections.abc import Collection, Iterator, Mapping

from metaloom.pipeline.config.sources import changed_sources
from metaloom.pipeline.nn.device import arithmetic_facts
from metaloom.storage import Run, StageRef
from metaloom.storage.format.provenance import system
from metaloom.storage.read.info import mapping

log: logging.Logger = logging.getLogger(__name__)

_DECIDES_BITS = ("cpu", "cpu_flags", "libc")


def changes_of(run: Run, ref: StageRef, now: Mapping[str, str]) -> list[str]:
    """Return the changes in plug-in sources since a stored output was computed."""
    return changed_sources(now, mapping(run.environment_of(ref).get("plugins")))


def warn_changed_sources(
    run: Run, ref: StageRef, now: Mapping[str, str], warned: Collection[str] = frozenset()
) -> set[str]:
    """Return warnings about plug-in sources that changed since an output was computed; log those not in `warned`."""
    if not now:  # as in most runs; nothing needs to be read then
        return set()
    session = run.record(ref).session
    lines = [f"{run.location}, session {session}: {change}; results may differ" for change in changes_of(run, ref, now)]
    for line in lines:
        if line not in warned:
            log.warning("%s", line)
    return {*lines}


def machine_changes(run: Run, ref: StageRef) -> Iterator[str]:
    """Yield differences between this process and the one that computed an output, if they may affect the output."""
    then, now = run.info.get("system", {}), system()
    for name in _DECIDES_BITS:
        before, today = str(then.get(name) or "absent"), now[name] or "absent"
        if name == "cpu_flags" and "absent" not in (before, today):
            old, new = {*before.split()}, {*today.split()}
            if old != new:
                unlike = (("without", old - new), ("with", new - old))
                yield f"a processor {', '.join(f'{word} {_few(flags)}' for word, flags in unlike if flags)}"
        elif before != today:
            yield f"{name} {before} then, {today} now"
    for name, found in mapping(run.environment_of(ref).get("numerics")).items():
        yield f"{name} was {found} in the process that computed it"
    known = mapping(run.environment_of(ref).get("arithmetic"))
    for name, today in arithmetic_facts().items():
        before = str(known.get(name, "not recorded"))
        if before != today:
            yield f"arithmetic of {name}: {before} then, {today} now"


def _few(flags: set[str]) -> str:
    shown = sorted(flags)[:5]
    return " ".join(shown) + (f" and {len(flags) - 5} more" if len(flags) > 5 else "")
