"""Sources of plug-ins that are no longer those that a stored output was computed with."""

import logging
from collections.abc import Collection, Mapping

from metaloom.pipeline.config.sources import changed_sources
from metaloom.storage import Run, StageRef
from metaloom.storage.read.sessions import mapping

log = logging.getLogger(__name__)


def changes_of(run: Run, ref: StageRef, now: Mapping[str, str]) -> list[str]:
    """Tell, half a sentence each, which of the sources that a stored output was computed with have changed.

    Args:
        run: the run.
        ref: the output.
        now: digests of the sources that would compute it today.
    """
    return changed_sources(now, mapping(run.environment_of(ref).get("plugins")))


def tell_changed_sources(
    run: Run, ref: StageRef, now: Mapping[str, str], told: Collection[str] = frozenset()
) -> set[str]:
    """Warn, once, of plug-ins that are no longer written as they were when a stored output was computed.

    Args:
        run: the run.
        ref: the output.
        now: digests of the sources that would compute it today.
        told: what need not be said again.

    Returns:
        What was said.
    """
    if not now:  # as of most runs, for which nothing need be read
        return set()
    session = run.record(ref).session
    lines = {f"{run.location}, session {session}: {change}; numbers may differ" for change in changes_of(run, ref, now)}
    for line in sorted(lines.difference(told)):
        log.warning("%s", line)
    return lines
