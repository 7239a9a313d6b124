"""An output is stored all at once or not at all, once, by one writer, in a chain of records."""

import copy
import itertools
import os
import threading
from dataclasses import replace

import numpy as np
import pytest

from metaloom import storage
from metaloom.pipeline.types import LearnerState, TaskBatch, TaskParams, Update
from metaloom.storage import StageRef
from metaloom.storage.format.codec import differing
from metaloom.storage.format.records import ArrayDigest
from metaloom.storage.write.publisher import Publisher
from metaloom.storage.write.sessions import Session
from metaloom.storage.writer import BackgroundQueue

TASKS = StageRef(0, "sample_tasks")
ROLLOUTS = StageRef(0, "collect_rollouts")


@pytest.fixture
def writer(tmp_path, creation):
    with storage.create_run(tmp_path / "run", capacity=2, **creation) as writer:
        yield writer


def test_an_output_is_invisible_until_its_record_is_published(tmp_path, creation, put, batches, monkeypatch):
    publish, seen = Session.publish, []

    def look_first(session, content, target):
        if target.parent.name == "_commits":
            seen.append((storage.open_run(tmp_path / "run").contains(TASKS), (tmp_path / "run/tables").exists()))
        publish(session, content, target)

    monkeypatch.setattr(Session, "publish", look_first)
    with storage.create_run(tmp_path / "run", capacity=1, **creation) as writer:
        put(writer, [(TASKS, batches.tasks(), [])])
        writer.flush()
        assert storage.open_run(tmp_path / "run").contains(TASKS)
        assert storage.open_run(tmp_path / "run")[0].tasks().params.shape == (3, 2)
    assert seen == [(False, False)]


def test_a_put_that_fails_before_its_record_stores_nothing_and_stops_the_writer(
    tmp_path, creation, put, batches, monkeypatch
):
    broken = OSError(28, "No space left on device")

    def fail(*_):
        raise broken

    monkeypatch.setattr(Publisher, "_record", fail)
    writer = storage.create_run(tmp_path / "run", capacity=1, **creation)
    put(writer, [(TASKS, batches.tasks(), [])])
    for call in (writer.flush, lambda: put(writer, [(ROLLOUTS, batches.episodes(), [])]), writer.close):
        with pytest.raises(storage.StorageFailed, match="No space left") as caught:
            call()
        assert caught.value.__cause__ is broken
    monkeypatch.undo()
    assert storage.open_run(tmp_path / "run").refs() == []
    with storage.open_writer(tmp_path / "run") as writer:
        put(writer, [(TASKS, batches.tasks(), [])])
    assert storage.open_run(tmp_path / "run").refs() == [TASKS]


def test_after_an_error_nothing_that_was_queued_behind_it_is_stored(tmp_path, creation, put, batches, monkeypatch):
    gate, publish, calls = threading.Event(), Publisher.publish, []

    def fail_once(publisher, output):
        gate.wait(300)
        calls.append(output.ref)
        if len(calls) == 1:
            raise OSError("once")
        publish(publisher, output)

    monkeypatch.setattr(Publisher, "publish", fail_once)
    writer = storage.create_run(tmp_path / "run", capacity=2, **creation)
    put(writer, [(TASKS, batches.tasks(), []), (StageRef(1, "sample_tasks"), batches.tasks(), [])])
    gate.set()
    with pytest.raises(storage.StorageFailed, match="once"):
        writer.close()
    assert (calls, storage.open_run(tmp_path / "run").refs()) == ([TASKS], [])


@pytest.mark.parametrize("act", ["restore", "describe", "thin", "thin_learners", "pack"])
def test_everything_put_is_committed_before_anything_else_touches_the_run(
    tmp_path, creation, put, batches, monkeypatch, act
):
    newest, awaited, touched = StageRef(2, "sample_tasks"), threading.Event(), []
    outputs = [batches.iteration(i) for i in range(3)]
    with storage.create_run(tmp_path / "run", capacity=3, **creation) as writer:
        put(writer, [*outputs[0], *outputs[1]])
        writer.flush()
        writer.thin([0])
        part, method, arguments = {
            "restore": (writer._thinner, "restore", ({ref: value for ref, value, _ in outputs[0] if ref.step == 1},)),
            "describe": (writer._session, "describe", ({"facts": "some"},)),
            "thin": (writer._thinner, "thin", ([1],)),
            "thin_learners": (writer._thinner, "thin", (2,)),
            "pack": (writer._packer, "pack", ()),
        }[act]
        publish, wait, inner = Publisher.publish, writer._queue.wait, getattr(type(part), method)

        def publish_when_awaited(publisher, output):
            awaited.wait()
            return publish(publisher, output)

        def wait_for_all():
            awaited.set()
            wait()

        def look_first(self, *given, **options):
            touched.append(storage.open_run(tmp_path / "run").contains(newest))
            awaited.set()
            return inner(self, *given, **options)

        monkeypatch.setattr(Publisher, "publish", publish_when_awaited)
        monkeypatch.setattr(writer._queue, "wait", wait_for_all)
        monkeypatch.setattr(type(part), method, look_first)
        put(writer, outputs[2][:1])
        try:
            getattr(writer, act)(*arguments)
        finally:
            awaited.set()
        assert touched[0], f"{act} came before what was put"


def test_an_output_that_is_not_queued_is_not_contained(writer, put, batches, monkeypatch):
    def fail(job):
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr(writer._queue, "submit", fail)
        with pytest.raises(OSError, match="full"):
            put(writer, [(TASKS, batches.tasks(), [])])
    assert not writer.contains(TASKS)
    put(writer, [(TASKS, batches.tasks(), [])])


def test_an_output_can_be_put_only_once(writer, put, batches):
    put(writer, [(TASKS, batches.tasks(), [])])
    with pytest.raises(storage.StageExists, match="sample_tasks"):
        put(writer, [(TASKS, batches.tasks(), [])])


def test_inputs_must_be_stored_before_what_was_computed_from_them(writer, put, batches):
    with pytest.raises(storage.StageMissing, match="sample_tasks"):
        put(writer, [(ROLLOUTS, batches.episodes(), [TASKS])])


def test_an_iteration_beyond_the_capacity_is_refused_and_fits_after_growing(writer, put, batches, tmp_path):
    for i in range(2):
        put(writer, batches.iteration(i))
    with pytest.raises(storage.LayoutMismatch, match="capacity of 2"):
        put(writer, batches.iteration(2))
    writer.close()
    with storage.open_writer(tmp_path / "run", capacity=4) as grown:
        assert grown.capacity == 4
        put(grown, batches.iteration(2) + batches.iteration(3))
    assert storage.verify_run(tmp_path / "run") == []
    assert len(storage.open_run(tmp_path / "run").iterations) == 4
    with storage.open_writer(tmp_path / "run", capacity=1) as again:
        assert again.capacity == 4


def test_a_growth_that_was_interrupted_is_finished_by_the_next_writer(make_run, monkeypatch):
    path = make_run(2)
    replace_, calls = Session.replace, []

    def fail_at_the_second(session, parts, targets):
        calls.append(targets)
        if len(calls) == 2:
            raise KeyboardInterrupt
        replace_(session, parts, targets)

    monkeypatch.setattr(Session, "replace", fail_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        storage.open_writer(path, capacity=5)
    monkeypatch.undo()
    assert storage.verify_run(path) == []
    with storage.open_writer(path) as writer:
        assert writer.capacity == 5
        rows = {name: writer.run.files.spec(name).rows for name in ("tasks/ids", "learner/params.float32")}
    assert rows == {"tasks/ids": 5, "learner/params.float32": 6}


def test_records_name_inputs_with_their_digests_and_form_one_chain(make_run):
    run = storage.open_run(make_run(2))
    records = sorted((run.record(ref) for ref in run.refs()), key=lambda record: record.sequence)
    assert [record.ref for record in records] == run.refs()
    assert [record.sequence for record in records] == list(range(len(records)))
    assert records[0].previous == run.info["sha256"]
    assert all(new.previous == old.sha256 for old, new in itertools.pairwise(records))
    assert all(run.record(item.ref).digest == item.digest for record in records for item in record.inputs)
    rollouts = run.record(StageRef(1, "collect_rollouts", 1))
    assert [item.ref for item in rollouts.inputs] == [StageRef(0, "meta_optimize"), StageRef(1, "sample_tasks")]
    assert (rollouts.seed_position, rollouts.config_digest, rollouts.seconds) == ((1, 1), "abc", 0.25)
    assert rollouts.started == "2023-11-14T22:13:20.000000+00:00"
    assert {"python", "numpy"} <= set(rollouts.versions)


def test_a_record_can_be_had_right_after_the_put(writer, put, batches, monkeypatch):
    tasks, asked = batches.tasks(), threading.Event()
    publish, flush = Publisher.publish, storage.RunWriter.flush

    def publish_late(publisher, output):
        asked.wait(10)  # until somebody waits for it
        return publish(publisher, output)

    def ask(writer):
        asked.set()
        flush(writer)

    monkeypatch.setattr(Publisher, "publish", publish_late)
    monkeypatch.setattr(storage.RunWriter, "flush", ask)
    put(writer, [(TASKS, tasks, [])])
    assert writer.record(TASKS).digest == storage.output_digest(storage.digest(tasks))


def test_digests_do_not_depend_on_the_order_of_mappings_or_on_strides(batches):
    params = batches.params()
    turned = {name: np.asfortranarray(value) for name, value in reversed(params.items())}
    digests = storage.digest(LearnerState(params))
    assert digests == storage.digest(LearnerState(turned))
    assert [*digests] == ["params.net.bias", "params.net.kernel"]  # by name, which batches are not
    assert storage.output_digest(digests) == storage.output_digest(dict(reversed(digests.items())))
    others = {name: ArrayDigest("", "float32", ()) for name in "hgfedcba"}
    assert differing({**others, "same": others["a"]}, {"same": others["a"]}) == [*"abcdefgh"]


def test_digests_tell_dtypes_and_shapes_of_equal_bytes_apart():
    zeros = [np.zeros(4, np.float32), np.zeros(4, np.int32), np.zeros((2, 2), np.float32), np.zeros(2)]
    digests = {storage.digest(LearnerState({"a": value}))["params.a"] for value in zeros}
    assert len(digests) == 4


def test_a_mapping_in_another_order_is_stored_as_the_same_output(tmp_path, creation, put, batches):
    params, again = batches.adapted(), batches.adapted()
    with storage.create_run(tmp_path / "run", capacity=2, **creation) as writer:
        put(writer, [(StageRef(0, "adapt"), params, [])])
        turned = TaskParams(dict(reversed(again.params.items())))
        put(writer, [(StageRef(1, "adapt"), turned, [])])
    run = storage.open_run(tmp_path / "run")
    assert storage.digest(run[1].adapted()) == storage.digest(again)
    assert list(run[1].adapted().params) == list(params.params)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: replace(b.episodes(), actions=np.zeros((3, 2, 5, 9), np.float32)), "shape"),
        (lambda b: replace(b.episodes(), actions=np.zeros((3, 2, 5), np.int64)), "dtype"),
    ],
)
def test_an_output_of_another_form_than_the_first_iterations_stops_the_writer(
    tmp_path, creation, put, batches, change, said
):
    with storage.create_run(tmp_path / "run", capacity=2, **creation) as writer:
        put(writer, [(ROLLOUTS, batches.episodes(), [])])
        put(writer, [(StageRef(1, "collect_rollouts"), change(batches), [])])
        with pytest.raises(storage.LayoutMismatch, match=said):
            writer.flush()
        with pytest.raises(storage.LayoutMismatch):
            writer.close()


def test_other_parameters_or_metrics_than_the_first_iterations_are_refused(tmp_path, creation, put, batches):
    outputs, stored = batches.iteration(0), ", as in the iterations already stored. Give arrays the same names, shapes"
    masses = TaskBatch(np.zeros((3, 2)), np.arange(3), ("velocity", "mass"), ("m/s", "g"))
    for stage, later, said in (
        ("adapt", TaskParams({"net.kernel": np.zeros((3, 5, 2), np.float32)}), "net.bias [2] at 0, net.kernel [4, 2]"),
        ("meta_optimize", Update(batches.learner(), {"loss": 1.0, "other": 2.0}), "step_0.average_return present"),
        ("sample_tasks", masses, "units ['m/s', 'kg']"),
    ):
        writer = storage.create_run(tmp_path / stage, capacity=2, **creation)
        put(writer, outputs)
        put(writer, [(StageRef(1, stage), later, [])])
        with pytest.raises(storage.LayoutMismatch, match=f"{stage}: iteration 1, {stage} k=0: ") as caught:
            writer.close()
        found, required = str(caught.value).split("; expected ")
        assert said in required
        assert stored in required
        assert "absent" in found or stage == "sample_tasks"


@pytest.mark.parametrize(
    "params",
    [
        {"a/b": np.zeros(2, np.float32)},
        {"": np.zeros(2, np.float32)},
        {"..": np.zeros(2, np.float32)},
        {"a": np.array([object()])},
        {"a": np.array(["text"])},
        {"a": np.zeros(2, ">f4")},
        {"a": np.zeros(2, np.complex64)},
    ],
)
def test_what_cannot_be_stored_safely_is_refused_at_once(writer, put, params):
    with pytest.raises(storage.LayoutMismatch):
        put(writer, [(StageRef(0, "initialize"), Update(LearnerState({}, {}, params), {}), [])])
    assert not writer.contains(StageRef(0, "initialize"))


def test_names_that_differ_only_in_case_are_refused_because_some_disks_cannot_tell_them_apart(
    tmp_path, creation, put, batches
):
    episodes = batches.episodes()
    terms = {"run": episodes.rewards, "Run": episodes.rewards}
    with (
        storage.create_run(tmp_path / "run", capacity=1, **creation) as writer,
        pytest.raises(storage.LayoutMismatch, match="only in case"),
    ):
        put(writer, [(ROLLOUTS, replace(episodes, reward_terms=terms), [])])


def test_a_value_that_its_stage_does_not_yield_is_refused(writer, put, batches):
    with pytest.raises(storage.LayoutMismatch, match="EpisodeBatch"):
        put(writer, [(ROLLOUTS, batches.tasks(), [])])
    with pytest.raises(storage.LayoutMismatch, match="metrics"):
        put(writer, [(StageRef(0, "initialize"), batches.update(), [])])
    with pytest.raises(storage.LayoutMismatch, match=r"dream\(i=0, k=0\); expected a stage of the run: initialize, "):
        put(writer, [(StageRef(0, "dream"), batches.tasks(), [])])


def test_a_closed_writer_refuses_to_write(tmp_path, creation, put, batches):
    with storage.create_run(tmp_path / "run", capacity=1, **creation) as writer:
        pass
    with pytest.raises(ValueError, match="closed"):
        put(writer, [(TASKS, batches.tasks(), [])])


def test_no_more_than_two_outputs_wait_for_the_disk(tmp_path, creation, put, batches, monkeypatch):
    gate, publish = threading.Event(), Publisher.publish
    monkeypatch.setattr(Publisher, "publish", lambda self, output: gate.wait(300) and publish(self, output))
    with storage.create_run(tmp_path / "run", capacity=1, **creation) as writer:
        outputs = batches.iteration(0)
        put(writer, outputs[:3])
        fourth = threading.Thread(target=put, args=(writer, outputs[3:4]))
        fourth.start()
        fourth.join(0.2)
        assert fourth.is_alive()
        gate.set()
        fourth.join(300)
        assert not fourth.is_alive()


def test_old_outputs_leave_memory_and_are_read_from_disk(make_run, batches, put, monkeypatch):
    path = make_run(1, capacity=40)
    with storage.open_writer(path) as writer:
        tasks = {i: batches.tasks() for i in range(1, 30)}
        put(writer, [(StageRef(i, "sample_tasks"), value, []) for i, value in tasks.items()])
        writer.flush()
        assert writer.load(StageRef(29, "sample_tasks")) is tasks[29]
        old = writer.load(StageRef(1, "sample_tasks"))
        assert old is not tasks[1]
        assert (old.params == tasks[1].params).all()


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [(RuntimeError("bug"), True), (storage.StoreError("x", found="a", required="b", action="c"), False)],
)
def test_an_error_in_the_block_is_not_hidden_by_one_of_the_writer(
    tmp_path, creation, put, batches, monkeypatch, caplog, error, has_traceback
):
    def fail(*_):
        raise error

    def put_and_fail():
        with storage.create_run(tmp_path / "run", capacity=1, **creation) as writer:
            put(writer, [(TASKS, batches.tasks(), [])])
            raise KeyError("mine")

    monkeypatch.setattr(Publisher, "publish", fail)
    with pytest.raises(KeyError, match="mine"):
        put_and_fail()
    (record,) = caplog.records
    assert record.message == f"not everything could be stored: {error}"
    assert ("Traceback" in caplog.text) is has_traceback


def test_a_run_is_created_only_where_nothing_is(tmp_path, creation, make_run):
    with pytest.raises(storage.RunExists, match="a run"):
        storage.create_run(make_run(1), capacity=1, **creation)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(storage.RunExists, match=r"thesis\.txt"):
        storage.create_run(tmp_path / "other", capacity=1, **creation)
    assert os.listdir(tmp_path / "other") == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    storage.create_run(tmp_path / "empty", capacity=1, **creation).close()


def test_a_creation_that_was_interrupted_can_be_repeated(tmp_path, creation, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "publish", fail)
    with pytest.raises(KeyboardInterrupt):
        storage.create_run(tmp_path / "run", capacity=1, **creation)
    monkeypatch.undo()
    with pytest.raises(storage.NotARun):
        storage.open_run(tmp_path / "run")
    storage.create_run(tmp_path / "run", capacity=1, **creation).close()
    assert storage.verify_run(tmp_path / "run") == []


def test_opening_what_is_no_run_says_so(tmp_path, make_run):
    with pytest.raises(storage.RunNotFound):
        storage.open_run(tmp_path / "nothing")
    for use in (storage.open_run, storage.open_writer, lambda path: storage.open_writer(path, repair=True)):
        with pytest.raises(storage.NotARun):
            use(tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(storage.StageMissing, match="2 iterations are complete"):
        storage.open_run(make_run(2))[2]
    with pytest.raises(storage.StageMissing):
        storage.open_run(tmp_path / "run")[-3]


def test_errors_survive_being_rebuilt_on_the_way_home_from_a_worker():
    error = copy.copy(storage.StageMissing("runs/x", found="nothing", required="something", action="Do it"))
    assert str(error) == "runs/x: nothing; expected something. Do it"


def test_who_goes_on_after_an_error_of_the_queue_gets_it_each_time():
    def fail(job):
        raise ValueError("torn")

    def go_on():
        for _ in range(4):
            with pytest.raises(ValueError, match="torn"):
                queue.wait()
            with pytest.raises(ValueError, match="torn"):
                queue.submit(job)
        told.append(True)

    queue, told, job = BackgroundQueue(fail, depth=1), [], (StageRef(0, "adapt"), None)
    queue.submit(job)
    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    thread.join(300)
    assert told == [True]
    queue.stop()


def test_a_record_that_appears_while_a_writer_holds_the_run_is_kept(tmp_path, creation, put, batches, monkeypatch):
    publish = Session.publish

    def late(session, content, target):
        if target.parent.name == "_commits":
            target.write_bytes(b"another's")
        publish(session, content, target)

    monkeypatch.setattr(Session, "publish", late)
    writer = storage.create_run(tmp_path / "run", capacity=1, **creation)
    put(writer, [(TASKS, batches.tasks(), [])])
    with pytest.raises(storage.StageExists, match=rf"{TASKS.file_name}: a record that appeared while this writer"):
        writer.close()
    assert (tmp_path / "run/_commits" / TASKS.file_name).read_bytes() == b"another's"
