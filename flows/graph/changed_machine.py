"""What of a processor and its arithmetic is no longer what a stored output was computed with."""

from collections.abc import Iterator

from metaloom.pipeline.nn.device import arithmetic_facts
from metaloom.storage import Run, StageRef
from metaloom.storage.format.provenance import system
from metaloom.storage.read.sessions import mapping

_DECIDES_BITS = ("cpu", "cpu_flags", "libc")


def machine_changes(run: Run, ref: StageRef) -> Iterator[str]:
    """Tell, a few words each, what decides bits in this process and was otherwise when an output was computed.

    Args:
        run: the run.
        ref: the output.
    """
    then, now = run.info.get("system", {}), system()
    for name in _DECIDES_BITS:
        before, today = str(then.get(name, "absent")), now[name]
        if name == "cpu_flags" and before != today:
            lost, new = ({*a.split()} - {*b.split()} for a, b in ((before, today), (today, before)))
            yield f"a processor without {_few(lost)}, with {_few(new)}"
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
    return " ".join(shown) + (f" and {len(flags) - 5} more" if len(flags) > 5 else "") if flags else "anything new"
