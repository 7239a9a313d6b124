"""Train a small run, then ask it questions with pandas, Arrow, DuckDB and xarray.

    python examples/train_and_inspect.py [FOLDER]

Takes a few seconds. Every question works the same on a run of any size; docs/analysis.md has more of them.
"""

import sys
import tempfile
from pathlib import Path

import pyarrow.compute as pc

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.views.report import write_report
from metaloom.pipeline.config.run import build_config


def train_small_run(folder: Path) -> storage.Run:
    """ProMP on the corner point robot: a recipe with smaller sizes and the dense reward."""
    settings = load_settings("promp-point-corner")
    settings["env"]["options"] = {"reward": "dense"}
    settings |= {"iterations": 8, "num_tasks": 10, "episodes_per_task": 10, "max_episode_steps": 50}
    # workers=0: sample in this process. The numbers do not depend on it.
    train(build_config(settings), folder, backend=Backend(workers=0))
    return storage.open_run(folder)


def ask_pandas(run: storage.Run) -> None:
    """Mean episode return per iteration, before (0) and after (1) adaptation: one line."""
    print(run.episodes().to_pandas().groupby(["iteration", "step"])["return"].mean().unstack())


def ask_arrow(run: storage.Run) -> None:
    """Mean reward per step of the last iteration, over all its steps; only this one column is read."""
    rewards = run.steps(iterations=-1, columns=["reward"])["reward"]
    print(f"{len(rewards):,} steps, mean reward {pc.mean(rewards).as_py():.3f}")


def ask_duckdb(run: storage.Run) -> None:
    """The tables are plain Parquet: any tool reads them, without Metaloom."""
    try:
        import duckdb
    except ImportError:
        print("(duckdb is not installed)")
        return
    files = run.path / "tables" / "episodes" / "*.parquet"
    query = f"""
        select iteration, step, count(*) as episodes, round(avg("return"), 2) as average_return
        from '{files}' group by all order by all limit 4
    """
    print("\n".join(str(row) for row in duckdb.sql(query).fetchall()))


def ask_xarray(run: storage.Run) -> None:
    """Show where the adapted policies of the last iteration end up, task by task, in arrays with named axes."""
    rollouts = run[-1].xarray(1)
    last_position = rollouts["observations"].isel(t_with_final=-1).mean("episode")
    for task in range(3):
        print(f"task {task}: mean final position {last_position.sel(task=task).values.round(2)}")


def ask_lineage(run: storage.Run) -> None:
    """Show where the time went. Every stored output has a record: inputs, digests, seconds, versions."""
    lineage = run.lineage().to_pandas()
    print(lineage.groupby(["stage", "step"])["seconds"].median().round(4))


def main() -> None:
    """Train and ask."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "small-run"
    run = train_small_run(folder)
    for ask in (ask_pandas, ask_arrow, ask_duckdb, ask_xarray, ask_lineage):
        print(f"\n{ask.__doc__}")
        ask(run)
    files = write_report(run, folder.parent / "reports" / folder.name)
    print(f"\nrun     {run.path}\nreport  {files.html}")


if __name__ == "__main__":
    main()
