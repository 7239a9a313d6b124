"""What cannot fit into this machine is refused before anything is created; what is large is told in one line.

Large is what takes more than half of the memory or of the disk's free space, or 100 million environment steps at once.
"""

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from metaloom.flows.estimate.forms import Forms
from metaloom.flows.estimate.sizes import Estimate, estimate, estimate_evaluation
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.views.formatting import count, size
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.memory import machine_memory
from metaloom.pipeline.schema import ConfigError

MANY_STEPS = 10**8

Sized = Callable[[RunConfig], Estimate]
"""What would be taken under other settings."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Machine:
    """Bytes that there are.

    Attributes:
        memory: that processes can have.
        disk: free where the run is to be stored.
    """

    memory: int
    disk: int

    @classmethod
    def here(cls, folder: Path) -> "Machine":
        """Look at this machine, and at the disk of a folder that need not exist yet."""
        existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
        return cls(machine_memory(), shutil.disk_usage(existing).free)

    def excess(self, found: Estimate) -> float:
        """Return how many times of what there is a run takes, of what there is least of."""
        return max(found.memory_bytes / self.memory, found.run_bytes / max(self.disk, 1))


def check_sizes(
    config: RunConfig, folder: Path, backend: Backend, *, stored: int = 0, forms: Forms | None = None
) -> Estimate:
    """Refuse a run that cannot fit into this machine, and tell of one that is large.

    Args:
        config: of the run.
        folder: where it is to be kept.
        backend: where rollouts run.
        stored: iterations that are on the disk already.
        forms: of its arrays, if they are known.

    Returns:
        What is left of it takes.

    Raises:
        ConfigError: naming the setting that is too large, and what fits.
    """
    found, refusal = size_up(config, folder, backend, stored=stored, forms=forms)
    if refusal is not None:
        raise ConfigError(refusal)
    return found


def size_up(
    config: RunConfig, folder: Path, backend: Backend, *, stored: int = 0, forms: Forms | None = None
) -> tuple[Estimate, str | None]:
    """Estimate what is left of a run, and why it cannot fit into this machine, None if it can; see `check_sizes`."""
    known, workers = forms or Forms.of(config), workers_here(config, backend)

    def sized(config: RunConfig) -> Estimate:
        left = max(config.iterations - stored, 1)
        to_do, computing = config.model_copy(update={"iterations": left}), backend.mathematics == "workers"
        found = estimate(to_do, known, workers, computing=computing)
        # A run with a budget stops before the disk is full, and one that may stop early need not get that far.
        bounded = config.retention.max_bytes is not None or config.stop is not None
        return replace(found, run_bytes=found.start_bytes + found.iteration_bytes) if bounded else found

    return _judged(config, sized, Machine.here(folder), "this run")


def check_evaluation(config: RunConfig) -> None:
    """Refuse an evaluation that cannot fit into this machine's memory, and tell of a large one; see `check_sizes`."""
    forms, machine = Forms.of(config), Machine(machine_memory(), 2**63)
    _, refusal = _judged(config, lambda config: estimate_evaluation(config, forms), machine, "this evaluation")
    if refusal is not None:
        raise ConfigError(refusal)


def _judged(config: RunConfig, sized: Sized, machine: Machine, what: str) -> tuple[Estimate, str | None]:
    found = sized(config)
    if machine.excess(found) > 1:
        return found, _refusal(config, sized, machine, what)
    if told := "; ".join(_large(found, machine)):
        _LOG.warning("%s is large: %s", what, told)
    return found, None


def workers_here(config: RunConfig, backend: Backend) -> int:
    """Return how many worker processes of this machine will sample."""
    return 0 if backend.scheduler is not None else backend.for_tasks(config.num_tasks).workers or 0


def _large(found: Estimate, machine: Machine) -> Iterator[str]:
    if found.memory_bytes > machine.memory / 2:
        yield f"up to {size(found.memory_bytes)} of this machine's {size(machine.memory)} of memory"
    if found.run_bytes > machine.disk / 2:
        yield f"up to {size(found.run_bytes)} of the disk's free {size(machine.disk)}"
    for when, steps in (("an iteration", found.steps), ("an evaluation", found.evaluation_steps)):
        if steps > MANY_STEPS:
            yield f"{when} takes up to {count(steps)} environment steps"


def _refusal(config: RunConfig, sized: Sized, machine: Machine, what: str) -> str:
    """Say which setting is to blame: the one without which the least is taken."""

    def excess(path: tuple[str, ...], value: int) -> float:
        return machine.excess(sized(_with(config, path, value)))

    found, numbers = sized(config), {path: n for path, n in _whole_numbers(config.model_dump()) if n > 1}
    least = {path: excess(path, 1) for path in numbers}
    path = min(least, key=lambda path: least[path])
    fits = "less of it and of other sizes"
    if least[path] <= 1:
        fits = f"at most {_largest(lambda value: excess(path, value) <= 1, numbers[path])}"
    needs: list[str] = []
    if found.memory_bytes > machine.memory:
        needs.append(f"takes up to {size(found.memory_bytes)} of memory, of which there are {size(machine.memory)}")
    if found.run_bytes > machine.disk:
        needs.append(f"stores up to {size(found.run_bytes)}, where {size(machine.disk)} are free")
        fits += "".join(f", or {way}" for way in _ways_to_store_less(config, sized, machine))
    return f"{'.'.join(path)}: found {numbers[path]}, with which {what} {' and '.join(needs)}; required {fits}"


def _ways_to_store_less(config: RunConfig, sized: Sized, machine: Machine) -> Iterator[str]:
    """Say what of the retention makes a run fit, if anything of it does."""

    def fits(**changes: int | None) -> bool:
        retention = config.retention.model_copy(update=changes)
        return machine.excess(sized(config.model_copy(update={"retention": retention}))) <= 1

    kept = config.retention
    if fits(keep_last=0, keep_every=None):
        # Iterations that either setting names are kept: beside one of them, the other would only keep more.
        ways = ["a smaller retention.keep_last"] if kept.keep_last else []
        ways += ["a larger retention.keep_every"] if kept.keep_every else []
        yield f"{' and '.join(ways) or 'retention.keep_last or retention.keep_every'} to keep fewer batches"
    if fits(max_bytes=1):
        yield "retention.max_bytes to stop in time"


def _largest(fits: Callable[[int], bool], value: int) -> int:
    """Return the largest number from 1 on that fits, where `value` does not."""
    low, high = 1, value
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _whole_numbers(settings: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _whole_numbers(cast(Mapping[str, Any], value), (*path, name))
        elif isinstance(value, int) and not isinstance(value, bool):
            yield (*path, name), value


def _with(settings: Any, path: tuple[str, ...], value: int) -> Any:
    name, *rest = path
    inner = settings[name] if isinstance(settings, Mapping) else getattr(settings, name)
    changed = {name: _with(inner, tuple(rest), value) if rest else value}
    if isinstance(settings, Mapping):  # options of an environment or a network
        return {**cast(Mapping[str, Any], settings), **changed}
    return settings.model_copy(update=changed)
