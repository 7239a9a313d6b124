"""docs/data_format.md lists what is stored."""

import json
import re
from fnmatch import fnmatchcase

import pytest

from metaloom import storage
from metaloom.storage import StageRef
from metaloom.storage.format.layout import ARRAYS
from metaloom.storage.format.stages import EARLIER, STEP

BEHAVIOR_OF_OTHERS = ("log_probs", "action_values", "epsilon", "posterior_mean", "posterior_log_std")
"""What behavior keeps in runs of algorithms that are not looked at here."""


@pytest.fixture(scope="module")
def document(pytestconfig):
    return (pytestconfig.rootpath / "docs" / "data_format.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows(document):
    """Array pattern -> (axes, dtype, unit, writers)."""
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in document.splitlines() if line.startswith("| `")
    ]
    writers = {row[0].strip("`"): row[1] for row in table if len(row) == 2}
    rows = {}
    for name, axes, dtype, unit, _ in (row for row in table if len(row) == 5):
        group = name.strip("`").partition("/")[0] + "/"
        axes = f"{'row' if group == 'learner/' else 'iteration'}, {axes}"
        rows[re.sub(r"\{\w+\}", "*", name.strip("`"))] = (axes, dtype, unit, writers[group])
    assert "`memory_fill/...` has the same arrays as `rollouts_{k}/...`, written by `fill_memory`" in document
    fill = {
        pattern.replace("rollouts_*", "memory_fill"): row for pattern, row in rows.items() if "rollouts_*" in pattern
    }
    return rows | {pattern: (*row[:3], "fill_memory") for pattern, row in fill.items()}


def test_every_stored_array_is_documented_with_its_axes_dtype_unit_and_writer(
    make_run, make_off_policy_run, batches, put, rows
):
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
    used = set()
    for data, path, stage in stored:
        metadata = json.loads((data / path / "zarr.json").read_text())
        (pattern,) = [pattern for pattern in rows if fnmatchcase(path, pattern)]
        axes, dtype, unit, writers = rows[pattern]
        assert fnmatchcase(", ".join(metadata["dimension_names"]), axes), path
        assert dtype in (metadata["data_type"], "any"), path
        assert unit == metadata["attributes"]["unit"], path
        assert stage in writers.split(", "), path
        used.add(pattern)
    unused = {f"rollouts_*/behavior.{name}" for name in BEHAVIOR_OF_OTHERS}
    unused |= {pattern for pattern in rows if pattern.startswith("memory_fill/behavior.")}
    # tests/flows/test_facts.py stores these.
    unused |= {pattern for pattern in rows if "facts." in pattern}
    assert used == set(rows) - unused - {"samples_*/adjusted_rewards"}


def test_every_kind_of_array_in_the_code_is_in_the_document(rows):
    documented = {pattern.replace("params.float32", "params.*") for pattern in rows}
    stages = {stage for table in EARLIER.values() for stage in table.stages}
    kinds = {f"{s.group.replace(STEP, '*')}/{plan.pattern}" for s in stages for plan in ARRAYS[s.output]}
    assert kinds - documented == {"rollouts_*/behavior.*", "memory_fill/behavior.*"}


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
    (transitions,) = re.findall(r"`run\.transitions\(rows\)` is computed.*?\n\n", document, re.DOTALL)
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
