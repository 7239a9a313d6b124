"""The stages of a run as data in its run.json: any table can be stored, and runs without one are of two known kinds."""

import numpy as np
import pytest

from metaloom import storage
from metaloom.pipeline.outputs import OutputSchema
from metaloom.storage import StageRef, StageTable, StoredStage
from metaloom.storage.format.files import read_sealed, render, sealed
from metaloom.storage.format.stages import OFF_POLICY, ON_POLICY

OWN = StageTable(
    [
        StoredStage("begin", "learner", "Update"),
        StoredStage("demonstrate", "demonstrations", "EpisodeBatch"),
        StoredStage("practise", "practice_{step}", "EpisodeBatch", thinnable=True),
        StoredStage("judge", "judged_{step}", "Samples", thinnable=True),
        StoredStage("imitate", "learner", "Update", ends_iteration=True),
    ]
)
FIELD = {"name": "scale", "axes": ["task"], "dtype": "float32", "unit": "m", "description": "size", "mapping": False}
SCHEMA = {"description": "", "fields": [FIELD]}
OBJECTS = {**FIELD, "dtype": "object"}


@pytest.fixture
def path(tmp_path, batches, put, creation):
    """A run of two iterations whose stages no version of metaloom knows."""
    with storage.create_run(tmp_path / "own", capacity=2, stages=OWN, **creation) as writer:
        put(writer, [(StageRef(0, "begin"), type(batches.update())(batches.learner(), {}), [])])
        for i in range(2):
            shown = StageRef(i, "demonstrate")
            put(writer, [(shown, batches.episodes(), [])])
            for k in range(2):
                practised = StageRef(i, "practise", k)
                episodes = batches.episodes()
                put(writer, [(practised, episodes, [shown])])
                put(writer, [(StageRef(i, "judge", k), batches.samples(episodes), [practised])])
            put(writer, [(StageRef(i, "imitate"), batches.update(), [shown])])
    return tmp_path / "own"


def test_a_run_of_stages_of_its_own_is_stored_read_and_verified(path):
    run = storage.open_run(path)
    assert list(run.iterations) == [0, 1]
    assert run.stages.document() == OWN.document()
    assert [str(ref) for ref in run.refs() if ref.iteration == 1] == [
        "demonstrate(i=1, k=0)",
        "practise(i=1, k=0)",
        "judge(i=1, k=0)",
        "practise(i=1, k=1)",
        "judge(i=1, k=1)",
        "imitate(i=1, k=0)",
    ]
    assert run.load(StageRef(1, "demonstrate")).num_steps
    assert run.files.spec("demonstrations/rewards").attributes["unit"] == "1"
    assert run.learner_ref(2) == StageRef(1, "imitate")
    assert storage.verify_run(path) == []


def test_what_a_table_calls_thinnable_goes_and_a_fork_has_the_same_stages(path, tmp_path, creation):
    with storage.open_writer(path) as writer:
        assert writer.thin([0]).files
    run = storage.open_run(path)
    assert [ref.stage for ref in run.refs() if run.is_thinned(ref)] == ["practise", "judge"] * 2
    storage.fork_run(run, 1, tmp_path / "fork", capacity=2, **creation)
    assert storage.open_run(tmp_path / "fork").stages.document() == OWN.document()
    assert storage.verify_run(tmp_path / "fork") == []


def test_what_no_stage_of_a_run_gives_is_told(path):
    with pytest.raises(storage.StageMissing, match="none of its stages outputs rollouts"):
        storage.open_run(path)[0].rollouts(0)


def test_an_output_that_is_not_as_its_schema_says_is_not_stored(tmp_path, batches, put, creation):
    schema = OutputSchema.parse("Scale", SCHEMA)
    measure = StoredStage("measure", "scales", "Scale", schema=schema)
    begin, *others = OWN.stages
    with storage.create_run(
        tmp_path / "own", capacity=1, stages=StageTable([begin, measure, *others]), **creation
    ) as writer:
        put(writer, [(StageRef(0, "begin"), type(batches.update())(batches.learner(), {}), [])])
        with pytest.raises(
            storage.LayoutMismatch, match=r"Scale.scale has dtype float64; required: float32\. Change what"
        ):
            put(writer, [(StageRef(0, "measure"), schema.record({"scale": np.ones(3)}), [])])
        put(writer, [(StageRef(0, "measure"), schema.record({"scale": np.ones(3, np.float32)}), [])])
    run = storage.open_run(tmp_path / "own")
    assert run[0].scales().scale.tolist() == [1, 1, 1]
    assert run.files.spec("scales/scale").attributes == {"unit": "m", "description": "size"}


@pytest.mark.parametrize("table", [ON_POLICY, OFF_POLICY])
def test_a_run_of_an_earlier_version_has_the_stages_of_its_kind(table, tmp_path, creation):
    storage.create_run(tmp_path / "run", capacity=1, stages=table, **creation).close()
    file = tmp_path / "run" / "run.json"
    info = {name: value for name, value in read_sealed(file, indented=True).items() if name != "stages"}
    file.write_bytes(render(sealed(info), indented=True))
    assert storage.open_run(tmp_path / "run").stages is table


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "0 make the first learner"),
        ([{"name": "a"}], "missing 2 required"),
        ([{"name": "a", "group": "g", "output": "Update", "code": "x"}], "unexpected keyword"),
        ([{**stage, "output": "Pickle"} for stage in OWN.document()], "output Pickle"),
        ([{**stage, "group": "../x"} for stage in OWN.document()], "group"),
        ([{**stage, "schema": SCHEMA} for stage in OWN.document()], "output EpisodeBatch, Samples, Update; required"),
        ([{**stage, "output": "Scale", "schema": 3} for stage in OWN.document()], "not the schema of an output"),
        (
            [{**stage, "output": "Scale", "schema": {**SCHEMA, "fields": [OBJECTS]}} for stage in OWN.document()],
            r"Scale.scale has entries of dtype object; required one of bool",
        ),
    ],
)
def test_a_run_json_whose_stages_are_no_table_is_refused(path, stages, message):
    file = path / "run.json"
    file.write_bytes(render(sealed({**read_sealed(file, indented=True), "stages": stages}), indented=True))
    with pytest.raises(storage.IncompatibleFormat, match=message):
        storage.open_run(path)
