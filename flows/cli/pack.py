"""`metaloom pack`."""

from metaloom.flows.cli.options import AsJson, RunArgument
from metaloom.flows.cli.output import answer
from metaloom.flows.runs import run_folder
from metaloom.flows.views.status import STATUS
from metaloom.storage import open_writer


def pack(run: RunArgument, *, as_json: AsJson = False) -> int:
    """Put old iterations into few files.

    What they hold and how it is read stays the same.

    All complete iterations are packed but the newest one. Training does so by itself: the oldest 500, whenever 600 are
    not packed.

    Example: `metaloom pack first`
    """
    with open_writer(run_folder(run)) as writer:
        packed = writer.pack(STATUS.counted("iterations"))
    segments = [[iterations.start, iterations.stop - 1] for iterations in packed]
    count = sum(map(len, packed))
    told = f"packed {count} iteration{'s'[: count != 1]} into {len(segments)} segment{'s'[: len(segments) != 1]}"
    if not count:
        told = "nothing to pack: every complete iteration but the newest is packed already"
    answer(as_json, lambda: {"iterations": count, "segments": segments}, lambda: told)
    return 0
