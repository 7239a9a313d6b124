"""`metaloom verify`."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Group, RenderableType

from metaloom.flows.cli.options import AsJson, RunArgument
from metaloom.flows.cli.output import answer
from metaloom.flows.runs import run_folder
from metaloom.flows.views.status import STATUS
from metaloom.storage import Damage, argument, location, open_run, verify_run

_UNSEALED = (
    "\nThe session that wrote last was killed, is still writing, or is of an earlier version: nobody could tell if its "
    "newest records had been taken away. The next session that ends seals them."
)


def verify(run: RunArgument, *, as_json: AsJson = False) -> int:
    """Check every stored file against its record.

    Exit code 0 when all are intact, 1 when one is damaged, missing or foreign. `metaloom resume RUN --repair` mends
    what is damaged or missing, or computes it again; what does not belong to the run is left to you.

    Example: `metaloom verify first`
    """
    from metaloom.flows.views.tables import damage_table

    folder = run_folder(run)
    damages = verify_run(folder, STATUS.counted("outputs"))

    def table() -> RenderableType:
        if damages:
            return Group(damage_table(damages), *what_helps(folder, damages))
        return f"{location(folder)}: every file is intact{'' if open_run(folder).is_sealed else _UNSEALED}"

    answer(as_json, lambda: [asdict(damage) for damage in damages], table)
    return 1 if damages else 0


def what_helps(folder: Path, damages: Sequence[Damage]) -> Iterator[str]:
    """Say what to do about what verification has found."""
    if any(damage.is_unreadable for damage in damages):
        yield "what you may not read was not checked: its owner can allow it, or verify the run"
    elif any(damage.is_link and not damage.is_foreign for damage in damages):
        yield f"links are no files of a run; make a run of what they lead to: cp -rL {argument(folder)} COPY"
        return
    elif any(not damage.is_foreign for damage in damages):
        yield f"mend it with: metaloom resume {argument(folder)} --repair"
    if any(damage.is_foreign for damage in damages):
        yield "remove yourself, or move away, what does not belong to the run: Metaloom removes no files of others"
