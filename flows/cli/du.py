"""`metaloom du`."""

from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter

from metaloom.flows.cli.options import RUN_HELP, AsJson, complete_runs
from metaloom.flows.cli.output import answer
from metaloom.flows.runs import run_folder, runs_root
from metaloom.flows.views.status import STATUS

Runs = Annotated[
    tuple[str, ...], Parameter(help=f"{RUN_HELP} Repeatable; all by default.", negative=(), completer=complete_runs)
]


def du(runs: Runs = (), /, *, as_json: AsJson = False) -> int:
    """Show the disk usage of runs.

    By group, stage and iteration; what is shared with forks; what could be freed.

    Example: `metaloom du first`
    """
    from metaloom.flows.commands.disk import disk_use
    from metaloom.flows.results.disk import DiskUse, bytes_together
    from metaloom.flows.views.disk_tables import disk_view
    from metaloom.storage import find_runs, unfinished_removals

    root = runs_root()
    paths = [run_folder(run) for run in runs] or find_runs(root)
    uses: list[DiskUse] = []
    for n, path in enumerate(paths, 1):
        uses.append(disk_use(path, STATUS.counted(f"outputs of run {n} of {len(paths)}")))
    leftovers = unfinished_removals(root)

    def data() -> dict[str, Any]:
        rows = [asdict(use) for use in uses]
        for row, use in zip(rows, uses, strict=True):
            if use.ranges is not None:
                ranges = use.ranges.items()
                row["ranges"] = [{"first": first, "last": last, "bytes": size} for (first, last), size in ranges]
        return {
            "runs": rows,
            "bytes": bytes_together(paths),
            "unfinished_removals": {"paths": [*map(str, leftovers)], "bytes": bytes_together(leftovers)},
        }

    answer(as_json, data, lambda: disk_view(uses, paths, leftovers, details=bool(runs)))
    return 0
