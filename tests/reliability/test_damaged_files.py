"""Every file of a run cut short, emptied, changed in one byte or gone, one at a time (T3)."""

import itertools

import pytest

from metaloom import storage

DAMAGES = {
    "middle byte": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 16]) + data[len(data) // 2 + 1 :]
    ),
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\0",
    "missing": lambda data: None,
}


def read_everything(path):
    """All that a run says it holds, by the name of what was asked for."""
    run = storage.open_run(path)
    found = {str(ref): storage.output_digest(storage.digest(run.load(ref))) for ref in run.refs()}
    tables = {} if run.refs() == [] else {"episodes": run.episodes, "tasks": run.tasks, "metrics": run.metrics}
    found |= {f"{name} {i}": str(table(i).to_pydict()) for name, table in tables.items() for i in run.iterations}
    found |= {f"steps {i}": str(run.steps(i).to_pydict()) for i in run.iterations}
    run.lineage()
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory, train_tiny):
    return train_tiny(tmp_path_factory.mktemp("damaged") / "run", iterations=1)


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("damage", ["each its own", *(pytest.param(name, marks=pytest.mark.sweep) for name in DAMAGES)])
def test_damage_of_any_one_file_is_detected_by_name_or_changes_nothing_that_is_read(run, damage):
    expected = read_everything(run)
    own = run / "_operator"  # logs and requests, which are no part of what was computed
    files = [file for file in sorted(run.rglob("*")) if file.is_file() and file.stat().st_size]
    files = [file for file in files if own not in file.parents]
    assert len(files) > 60
    silent = []
    for file, kind in zip(files, itertools.cycle(DAMAGES)):
        content, name = file.read_bytes(), file.relative_to(run).as_posix()
        changed = DAMAGES.get(damage, DAMAGES[kind])(content)
        file.write_bytes(changed or b"")
        if changed is None:
            file.unlink()
        found, error = _read(run)
        if error:
            assert str(file) in str(error) or name == "run.json", f"{name}: {error}"
        elif changed is None and name.startswith("_commits"):
            # A commit that is gone is an output that is not stored; what is left is as it was.
            left = {key: value for key, value in found.items() if not key.startswith("steps")}
            assert left.items() <= expected.items(), name
        else:
            assert found == expected, name
            silent.append(name)
        second = changed is None and name.startswith("_sessions") and name.endswith("run.json")  # a copy less
        assert second or _reports(run, name, changed), name
        file.write_bytes(content)
    # What reading does not need: who wrote the run and the copy of run.json, what tells plain zarr of groups, and the
    # metrics' table for other tools, which Metaloom reads from their array.
    assert all(name.startswith(("_sessions", "tables/metrics/")) or name.endswith("zarr.json") for name in silent), (
        silent
    )
    assert len(silent) < 13
    assert read_everything(run) == expected


def _read(run):
    try:
        return read_everything(run), None
    except storage.StoreError as error:
        return None, error


def _reports(run, name, changed):
    """Tell if verification names the file; if it is gone, one that needs it will do."""
    problems = storage.verify_run(run)
    return any(problem.file == name for problem in problems) or (changed is None and problems != [])
