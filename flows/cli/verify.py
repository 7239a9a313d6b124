"""`metaloom verify`."""

from dataclasses import asdict

from metaloom.flows.cli.options import AsJson, RunArgument
from metaloom.flows.cli.output import answer
from metaloom.flows.runs import run_folder
from metaloom.storage import location, verify_run


def verify(run: RunArgument, *, as_json: AsJson = False) -> int:
    """Check every stored file of a run against its records.

    Exit code 0 when all are intact, 1 when one is damaged, missing or foreign.

    Example: `metaloom verify first`
    """
    from metaloom.flows.views.tables import damage_table

    folder = run_folder(run)
    damages = verify_run(folder)
    whole = f"{location(folder)}: every file is intact"
    answer(as_json, lambda: [asdict(damage) for damage in damages], lambda: damage_table(damages) if damages else whole)
    return 1 if damages else 0
