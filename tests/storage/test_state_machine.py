"""Any sequence of puts, closes, take-overs, growths, lost records and readers agrees with a dictionary."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from metaloom import storage
from metaloom.pipeline.types import LearnerState, TaskBatch, TaskParams, Update
from metaloom.storage import StageRef

CREATION = {"config": {}, "config_digest": "", "environment": {}}
STAGES = ("sample_tasks", "adapt", "meta_optimize")
REFS = st.builds(StageRef, st.integers(0, 3), st.sampled_from(STAGES))


def value_of(ref: StageRef, number: int):
    if ref.stage == "sample_tasks":
        return TaskBatch(np.full((2, 1), float(number)), np.array([number, -1]), ("x",), ("m",))
    params = {"w": np.full((2, 3), number, np.float32)}
    return TaskParams(params) if ref.stage == "adapt" else Update(LearnerState(params), {"loss": float(number)})


class StoredRun(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="store-"))
        self.path = self.folder / "run"
        self.model = {}
        self.capacity = 2
        self.writer = None
        self.flushed = True

    @initialize()
    def create(self):
        self.writer = storage.create_run(self.path, capacity=self.capacity, **CREATION)

    @precondition(lambda self: self.writer)
    @rule(ref=REFS, number=st.integers(0, 9))
    def put(self, ref, number):
        about = {"inputs": [], "seed_position": [number], "started": 0.0, "seconds": 0.0}
        expected = None
        if ref in self.model:
            expected = storage.StageExists
        elif ref.iteration >= self.capacity:
            expected = storage.LayoutMismatch
        if expected:
            with pytest.raises(expected):
                self.writer.put(ref, value_of(ref, number), **about)
            return
        self.writer.put(ref, value_of(ref, number), **about)
        self.model[ref] = number
        self.flushed = False

    @precondition(lambda self: self.writer)
    @rule()
    def flush(self):
        self.writer.flush()
        self.flushed = True

    @precondition(lambda self: self.writer)
    @rule()
    def pack(self):
        self.writer.pack()
        self.flushed = True

    @precondition(lambda self: self.writer)
    @rule()
    def close(self):
        self.writer.close()
        self.writer, self.flushed = None, True

    @precondition(lambda self: not self.writer)
    @rule(capacity=st.none() | st.integers(1, 4))
    def open(self, capacity):
        self.writer = storage.open_writer(self.path, capacity=capacity)
        self.capacity = max(self.capacity, capacity or 0)
        assert self.writer.capacity == self.capacity

    @precondition(lambda self: self.writer)
    @rule()
    def take_over(self):
        self.flush()
        heir, zombie = storage.open_writer(self.path, take_over=True), self.writer
        free = [StageRef(0, stage) for stage in STAGES if StageRef(0, stage) not in self.model]
        for ref in free[:1]:
            zombie.put(ref, value_of(ref, 99), inputs=[], seed_position=[], started=0.0, seconds=0.0)
            with pytest.raises(storage.FencedOut):
                zombie.flush()
        try:
            zombie.close()
        except storage.FencedOut:
            assert free
        self.writer = heir

    @precondition(lambda self: not self.writer and self.model)
    @rule(data=st.data())
    def lose_a_record(self, data):
        ref = data.draw(st.sampled_from(sorted(self.model, key=str)))
        if not (self.path / "_commits" / ref.file_name).exists():  # it is in a segment
            return
        (self.path / "_commits" / ref.file_name).unlink()
        del self.model[ref]
        storage.open_writer(self.path).close()  # takes note of the loss

    @precondition(lambda self: not self.writer and self.model)
    @rule(data=st.data())
    def lose_a_chunk(self, data):
        ref = data.draw(st.sampled_from(sorted(self.model, key=str)))
        run = storage.open_run(self.path)
        record = run.record(ref)
        path = run.path / record.chunks[0].path
        if (segment := run.files.segments.holding(ref)) is not None:
            path = segment.chunk_path(run.files.spec(record.chunks[0].array), run.stages.row_of(ref))
            lost = {r for r in self.model if record.chunks[0].array in {c.array for c in run.record(r).chunks}}
            lost = {r for r in lost if run.files.segments.holding(r) is segment}
        path.unlink()
        with pytest.raises(storage.DamagedRun):
            storage.open_writer(self.path)
        storage.open_writer(self.path, repair=True).close()
        for gone in lost if segment else {ref}:  # a file of a segment has the rows of all its iterations
            self.model.pop(gone, None)
            self.model.pop(StageRef(gone.iteration, "meta_optimize"), None)

    @precondition(lambda self: self.writer)
    @invariant()
    def the_writer_knows_every_output(self):
        for iteration in range(self.capacity):
            for stage in STAGES:
                ref = StageRef(iteration, stage)
                assert self.writer.contains(ref) == (ref in self.model)

    @precondition(lambda self: self.writer)
    @rule()
    def the_writer_loads_every_output(self):
        for ref, number in self.model.items():
            assert storage.digest(self.writer.load(ref)) == storage.digest(value_of(ref, number))

    @precondition(lambda self: self.flushed and self.path.exists())
    @rule()
    def a_reader_sees_every_output(self):
        run = storage.open_run(self.path)
        assert run.refs() == sorted(self.model, key=run.stages.position)
        for ref, number in self.model.items():
            assert storage.digest(run.load(ref)) == storage.digest(value_of(ref, number))
        done = [StageRef(i, "meta_optimize") in self.model for i in range(4)] + [False]
        assert len(run.iterations) == done.index(False)
        assert storage.verify_run(self.path) == []

    def teardown(self):
        if self.writer:
            self.writer.close()
        shutil.rmtree(self.folder)


@pytest.mark.slow
@pytest.mark.no_cover
def test_any_sequence_of_operations_agrees_with_a_dictionary():
    limits = settings(
        max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    run_state_machine_as_test(StoredRun, settings=limits)
