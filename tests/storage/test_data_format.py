"""docs/data_format.md and docs/records.md list what is stored."""

import json
import re
import runpy
from fnmatch import fnmatchcase

import pytest

from metaloom import storage
from metaloom.storage import StageRef


@pytest.fixture(scope="module")
def document(pytestconfig):
    docs = pytestconfig.rootpath / "docs"
    return "".join((docs / name).read_text(encoding="utf-8") for name in ("data_format.md", "records.md"))


@pytest.fixture(scope="module")
def arrays(pytestconfig, document):
    """Array pattern -> (axes, unit, writers), of the page as the documentation's site has it."""
    hooks = runpy.run_path(str(pytestconfig.rootpath / "docs" / "site_hooks.py"))
    page = hooks["on_page_markdown"](document)
    rows = re.findall(r"^\| `([^`|]+)` \| ([^|]+) \| ([^|]+) \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE)
    return {name.replace("{k}", "*"): (axes, unit, writers.split(", ")) for name, axes, unit, writers in rows}


def test_every_stored_array_is_listed_with_axes_unit_and_writer(make_run, make_off_policy_run, batches, put, arrays):
    path = make_run(1, "on")
    with storage.open_writer(path) as writer:
        ref = StageRef(0, "evaluate")
        put(writer, [(ref, batches.evaluation(), [StageRef(0, "meta_optimize")])])
    stored = [
        (run.path / "data.zarr", chunk.array, ref.stage)
        for run in (storage.open_run(path), storage.open_run(make_off_policy_run(1, "off")))
        for ref in run.refs()
        for chunk in run.record(ref).chunks
    ]
    assert len({path for _, path, _ in stored}) > 30
    for data, path, stage in stored:
        metadata = json.loads((data / path / "zarr.json").read_text())
        pattern = next(pattern for pattern in arrays if fnmatchcase(path, pattern))
        axes, unit, writers = arrays[pattern]
        first, *others = metadata["dimension_names"]
        assert first == ("row" if path.startswith("learner/") else "iteration"), path
        assert fnmatchcase(", ".join(others), axes) or pattern.endswith("behavior.*"), path
        assert unit == metadata["attributes"]["unit"], path
        assert stage in writers, path


def test_the_columns_of_every_table_are_documented(make_run, make_off_policy_run, batches, put, document):
    path = make_run(1, "on")
    with storage.open_writer(path) as writer:
        put(writer, [(StageRef(0, "evaluate"), batches.evaluation(), [StageRef(0, "meta_optimize")])])
    run = storage.open_run(path)
    tables = {"episodes": run.episodes(), "tasks": run.tasks(), "evaluations": run.evaluations()}
    for name, table in tables.items():
        (line,) = [line for line in document.splitlines() if line.startswith(f"| `{name}` |")]
        assert all(column in line for column in table.column_names if not column.startswith("task_")), name
    (steps,) = re.findall(r"`run\.steps\(\)` is computed.*?\n\n", document, re.DOTALL)
    off_policy = storage.open_run(make_off_policy_run(1, "off"))
    columns = {*run.steps().column_names, *off_policy.steps().column_names}
    assert all(column in steps for column in columns if not column.startswith("reward_"))
    (transitions,) = re.findall(r"`run\.transitions\(rows\)` similarly has.*?\n\n", document, re.DOTALL)
    assert all(column in transitions for column in off_policy[0].transitions().column_names)


def test_every_field_of_a_record_is_documented(make_run, make_off_policy_run, document):
    def record_of(path, stage):
        return json.loads((path / "_commits" / storage.StageRef(0, stage).file_name).read_bytes())

    shown, spans = (json.loads(example) for example in re.findall(r"```json\n(.*?)```", document, re.DOTALL))
    record = record_of(make_run(1), "collect_rollouts")
    assert shown.keys() == record.keys()
    assert shown["chunks"][0].keys() == record["chunks"][0].keys()
    assert shown["inputs"][0].keys() == record["inputs"][0].keys()
    off_policy = record_of(make_off_policy_run(1, "off"), "update")
    assert off_policy.keys() - record.keys() == spans.keys()
    assert spans["spans"][0].keys() == off_policy["spans"][0].keys()
    assert all(spans["spans"][0][end].keys() == off_policy["spans"][0][end].keys() for end in ("first", "last"))
