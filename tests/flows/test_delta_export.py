"""Many runs in one folder of Delta tables: each once, whatever is repeated, and what DuckDB makes of it."""

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from threading import Thread

import duckdb
import pyarrow as pa
import pytest

from metaloom import storage
from metaloom.flows.commands.train import resume, train
from metaloom.flows.errors import UsageError
from metaloom.flows.exports import delta, export
from metaloom.flows.rollouts.workers import Backend
from metaloom.storage.export import ExportExists

deltalake = pytest.importorskip("deltalake")
SERIAL = Backend(workers=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_config):
    """Two runs of one environment, and one of another; not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    dense = {"name": "point-corner", "options": {"reward": "dense"}}
    evaluation = {"every": 2, "num_tasks": 2, "adaptation_steps": 1, "test_episodes": 2}
    train(tiny_config(env=dense, iterations=2, evaluation=evaluation), folder / "first", backend=SERIAL)
    train(tiny_config(env=dense, iterations=1, seed=2), folder / "second", backend=SERIAL)
    train(tiny_config(env="half-cheetah-dir", iterations=1, max_episode_steps=3), folder / "robot", backend=SERIAL)
    return folder


def lake(folder, name):
    return deltalake.DeltaTable(folder / name)


def rows_of(folder, name, run):
    """The rows of a run in a table of the folder, with the columns and the order of the run's own table."""
    own = getattr(run, name)()
    found = lake(folder, name).to_pyarrow_dataset().to_table(filter=pa.compute.field("run_id") == run.info["id"])
    keys = [(key, "ascending") for key in ("iteration", "step", "task", "episode") if key in own.column_names]
    keys += [("test", "ascending"), ("adaptation_steps", "ascending")] if name == "evaluations" else []
    return found.select(own.column_names).sort_by(keys).to_pydict(), own.sort_by(keys).to_pydict()


def test_runs_are_appended_once_however_often_they_are_exported_and_duckdb_reads_them(runs, tmp_path):
    opened = [storage.open_run(runs / name) for name in ("first", "second", "robot")]
    done = [export(run, tmp_path / "lake", "delta") for run in opened]
    assert [(result.iterations, result.skipped) for result in done] == [(2, []), (1, []), (1, [])]
    tables = [run.episodes().num_rows + run.tasks().num_rows + run.metrics().num_rows for run in opened]
    assert [result.rows for result in done] == [tables[0] + opened[0].evaluations().num_rows, *tables[1:]]
    for run in opened:
        for name in ("episodes", "tasks", "metrics", *(("evaluations",) if run.name == "first" else ())):
            found, own = rows_of(tmp_path / "lake", name, run)
            assert found == own
    columns = lake(tmp_path / "lake", "tasks").to_pyarrow_dataset().schema.names
    assert columns[:2] == ["run", "iteration"]  # deltalake puts run_id last
    versions = {name: lake(tmp_path / "lake", name).version() for name in delta.TABLES}
    again = export(opened[0], tmp_path / "lake", "delta")
    assert (again.iterations, again.rows) == (0, 0)
    assert {name: lake(tmp_path / "lake", name).version() for name in delta.TABLES} == versions
    episodes = lake(tmp_path / "lake", "episodes").to_pyarrow_dataset()  # noqa: F841
    counted = duckdb.sql("select run, max(iteration), count(*) from episodes group by run order by run").fetchall()
    assert counted == [
        (run.name, len(run) - 1, run.episodes().num_rows) for run in sorted(opened, key=lambda r: r.name)
    ]


def test_runs_whose_columns_have_other_units_stand_side_by_side(runs, tmp_path, tiny_config):
    train(tiny_config(env="hidden-goal-grid", iterations=1), tmp_path / "grid", backend=SERIAL)
    opened = [storage.open_run(path) for path in (runs / "first", tmp_path / "grid")]
    units = {run.episodes().schema.field("task_goal_x").metadata[b"unit"] for run in opened}
    assert units == {b"m", b"1"}
    for run in opened:
        export(run, tmp_path / "lake", "delta")
    for run in opened:
        found, own = rows_of(tmp_path / "lake", "episodes", run)
        assert found == own


def test_tables_that_an_earlier_version_wrote_with_units_go_on(runs, tmp_path, tiny_config, monkeypatch):
    train(tiny_config(env="hidden-goal-grid", iterations=1), tmp_path / "grid", backend=SERIAL)
    with monkeypatch.context() as earlier:
        earlier.setattr(delta, "_without_units", lambda schema: schema)
        export(storage.open_run(runs / "first"), tmp_path / "lake", "delta")
    grid = storage.open_run(tmp_path / "grid")
    export(grid, tmp_path / "lake", "delta")
    found, own = rows_of(tmp_path / "lake", "episodes", grid)
    assert found == own


def test_of_a_run_that_went_on_only_what_is_new_is_appended_under_any_name_and_place(runs, tmp_path):
    moved = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(runs / "first", moved)
    export(storage.open_run(runs / "first"), tmp_path / "lake", "delta")
    resume(moved, iterations=4, backend=SERIAL)
    result = export(storage.open_run(moved), tmp_path / "lake", "delta")
    assert result.iterations == 2
    for name in delta.TABLES:
        found, own = rows_of(tmp_path / "lake", name, storage.open_run(moved))
        assert found == own


def test_an_export_that_was_killed_between_two_tables_is_finished_by_the_next(runs, tmp_path, monkeypatch):
    run, place = storage.open_run(runs / "first"), tmp_path / "new" / "lake"
    with monkeypatch.context() as killed:
        killed.setattr(delta, "TABLES", ("episodes", "tasks"))
        export(run, place, "delta")
    export(run, place, "delta")
    for name in delta.TABLES:
        found, own = rows_of(place, name, run)
        assert found == own


def test_two_exports_of_a_run_to_a_new_folder_at_once_append_it_once(runs, tmp_path, monkeypatch):
    run, write, other = storage.open_run(runs / "first"), delta.write_deltalake, []

    def write_meanwhile(*arguments, **options):
        if not other:
            other.append(Thread(target=export, args=(run, tmp_path / "lake", "delta")))
            other[0].start()
            other[0].join(0.5)  # the other export waits for this one
        write(*arguments, **options)

    monkeypatch.setattr(delta, "write_deltalake", write_meanwhile)
    export(run, tmp_path / "lake", "delta")
    other[0].join()
    for name in delta.TABLES:
        found, own = rows_of(tmp_path / "lake", name, run)
        assert found == own


def test_of_two_exports_of_a_run_on_two_machines_one_is_refused_and_nothing_is_there_twice(runs, tmp_path, monkeypatch):
    run = storage.open_run(runs / "first")
    export(storage.open_run(runs / "second"), tmp_path / "lake", "delta")
    write, others = delta.write_deltalake, []

    def write_second(*arguments, **options):
        if not others:
            others.append(None)
            export(run, tmp_path / "lake", "delta")
        write(*arguments, **options)

    monkeypatch.setattr(delta, "write_deltalake", write_second)
    monkeypatch.setattr(delta, "locked", nullcontext)  # as on a file system whose machines do not share locks
    with pytest.raises(UsageError, match="another export of the same run was writing at the same time"):
        export(run, tmp_path / "lake", "delta")
    export(run, tmp_path / "lake", "delta")
    for name in delta.TABLES:
        found, own = rows_of(tmp_path / "lake", name, run)
        assert found == own


def test_folders_of_other_things_are_refused(runs, tmp_path):
    run = storage.open_run(runs / "first")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    os.symlink(tmp_path / "mine", tmp_path / "link")
    for name in ("file", "dangling"):
        (tmp_path / name).mkdir()
    (tmp_path / "file" / "episodes").touch()
    (tmp_path / "dangling" / "tasks").symlink_to(tmp_path / "nothing")
    for out, found in (
        ("mine", "'thesis.tex' in it"),
        ("mine/thesis.tex", "a link or a file"),
        ("link", "'thesis.tex' in it"),
        ("file", "'episodes' in it"),
        ("dangling", "'tasks' in it"),
    ):
        with pytest.raises(ExportExists, match=f"^.*{out}: {found}; expected .* the folders episodes, .*--out$"):
            export(run, tmp_path / out, "delta")
    assert [*tmp_path.joinpath("mine").iterdir()] == [tmp_path / "mine" / "thesis.tex"]


@pytest.mark.parametrize("names", [("run_id", "run", "return"), ("return", "run", "run_id")])
def test_a_column_of_another_type_is_named(runs, tmp_path, names):
    run = storage.open_run(runs / "first")
    table = pa.table({name: ["x"] for name in names})
    deltalake.write_deltalake(tmp_path / "lake" / "episodes", table, partition_by=["run_id"])
    with pytest.raises(UsageError, match=r"the column 'return' has the type \w+, but \w+ in the run"):
        export(run, tmp_path / "lake", "delta")


def test_a_disk_that_gets_full_is_named_in_one_line(runs, tmp_path):
    command = [sys.executable, "-m", "metaloom.flows.cli", "export", str(runs / "first"), "--to", "delta", "--out"]
    limited = ["sh", "-c", 'ulimit -f 1; exec "$@"', "sh", *command, str(tmp_path / "lake")]
    ended = subprocess.run(limited, capture_output=True, text=True)
    message = ended.stderr.splitlines()[-1]
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False)
    assert message.startswith(f"metaloom: {tmp_path / 'lake'}: File too large: ")
    assert message.endswith("; this needs free space and permission to write it. Free space, or choose another --out")


def test_a_disk_that_gets_full_in_a_transaction_is_named_in_one_line(runs, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError("Generic LocalFileSystem error\n  \x1b[31m↳\x1b[0m No space left on device (os error 28)\n")

    monkeypatch.setattr(delta, "write_deltalake", fail)
    with pytest.raises(storage.StorageFailed, match=r"^.*/lake: No space left on device: .*/lake/episodes; this needs"):
        export(storage.open_run(runs / "first"), tmp_path / "lake", "delta")


def test_a_run_that_is_damaged_before_its_last_iteration_is_named_by_its_own_error(runs, tmp_path):
    shutil.copytree(runs / "first", tmp_path / "damaged")
    (table,) = (tmp_path / "damaged" / "tables" / "episodes").glob("*0.parquet")
    table.write_bytes(b"damaged")
    with pytest.raises(storage.DamagedRun, match=r"episodes/00000000\.parquet"):
        export(storage.open_run(tmp_path / "damaged"), tmp_path / "lake", "delta")


def test_a_forged_identity_names_no_folder(runs, tmp_path):
    run = storage.open_run(runs / "first")
    for forged in ("../../outside", "", None, 3):
        run.info["id"] = forged
        with pytest.raises(UsageError, match="has no valid run ID"):
            export(run, tmp_path / "lake", "delta")
