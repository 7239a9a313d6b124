"""The stages of a run as data in its run.json: any table can be stored, and runs without one are of two known kinds."""

import copy
from dataclasses import replace

import numpy as np
import pytest

from metaloom import storage
from metaloom.pipeline.outputs import OutputSchema
from metaloom.storage import StageRef, StageTable, StoredStage
from metaloom.storage.format.codec import decode
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
            storage.LayoutMismatch, match=r"Scale.scale has dtype float64; expected float32\. Change what"
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
        ([{**stage, "schema": SCHEMA} for stage in OWN.document()], "output EpisodeBatch, Samples, Update; expected"),
        ([{**stage, "output": "Scale", "schema": 3} for stage in OWN.document()], "not an output schema"),
        (
            [{**stage, "output": "Scale", "schema": {**SCHEMA, "fields": [OBJECTS]}} for stage in OWN.document()],
            r"Scale.scale has entries of dtype object; expected one of bool",
        ),
    ],
)
def test_a_run_json_whose_stages_are_no_table_is_refused(path, stages, message):
    file = path / "run.json"
    file.write_bytes(render(sealed({**read_sealed(file, indented=True), "stages": stages}), indented=True))
    with pytest.raises(storage.IncompatibleFormat, match=message):
        storage.open_run(path)


def test_arrays_that_contradict_the_schema_of_their_output_are_refused():
    measure = StoredStage("measure", "scales", "Scale", schema=OutputSchema.parse("Scale", SCHEMA))
    sound = {"scales": {"scale": (np.ones(3, np.float32), {})}}
    assert decode(measure, "scales", sound).scale.tolist() == [1, 1, 1]
    for wrong in (np.ones(3), np.ones((3, 2), np.float32)):
        with pytest.raises(ValueError, match=r"Scale\.scale has (dtype float64|shape \[3, 2\])"):
            decode(measure, "scales", {"scales": {"scale": (wrong, {})}})


def test_an_output_of_a_stage_that_the_run_does_not_have_is_named(path):
    for read in (OWN.__getitem__, lambda name: storage.open_run(path).load(StageRef(0, name))):
        with pytest.raises(storage.StoreError, match=r"dream"):
            read("dream")
    with pytest.raises(storage.IncompatibleFormat, match=r"run\.json: no stage 'dream'; the stages are begin, "):
        OWN["dream"]


def test_an_iteration_has_a_method_for_each_stage_and_no_others(path):
    iteration = storage.open_run(path)[0]
    assert iteration.practise(1).num_steps == storage.open_run(path).load(StageRef(0, "practise", 1)).num_steps
    with pytest.raises(
        AttributeError, match=r"has no 'dreams'; the stages of the run are begin, demonstrate, practise,"
    ):
        _ = iteration.dreams
    for name in ("_begin", "__deepcopy__"):
        with pytest.raises(AttributeError, match=f"^{name}$"):
            getattr(iteration, name)
    assert copy.copy(iteration).index == 0


def test_a_group_that_holds_something_else_than_its_name_says_is_refused(tmp_path, creation, put, batches):
    begin, demonstrate, *others = OWN.stages
    table = StageTable([begin, replace(demonstrate, group="tasks"), *others])
    with storage.create_run(tmp_path / "run", capacity=1, stages=table, **creation) as writer:
        put(writer, [(StageRef(0, "demonstrate"), batches.episodes(), [])])
        put(writer, [(StageRef(0, "imitate"), batches.update(), [])])
    with pytest.raises(storage.DamagedRun, match=r"demonstrate.*: holds a EpisodeBatch"):
        storage.open_run(tmp_path / "run")[0].tasks()


def test_outputs_of_inner_steps_that_one_table_cannot_hold_are_refused(tmp_path, creation, put, batches):
    outputs, last = batches.iteration(0), StageRef(0, "collect_rollouts", 1)
    choices = replace(batches.episodes(), actions=np.zeros((3, 2, 5), np.int64))
    with storage.create_run(tmp_path / "run", capacity=1, **creation) as writer:
        put(writer, [(ref, choices if ref == last else value, inputs) for ref, value, inputs in outputs])
    run = storage.open_run(tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"these outputs do not fit into one table \((.|\n)*\); read fewer inner steps"
    ):
        run.table("rollouts", columns=["actions"])
    assert run.table("rollouts", columns=["actions"], steps=1)["actions"].to_pylist() == [0] * choices.num_steps
    with pytest.raises(ValueError, match=r"rollouts\(i=0, k=1\) has no column returns; available columns: .*rewards"):
        run.table("rollouts", columns=["rewards", "returns"], steps=1)
