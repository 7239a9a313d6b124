"""Any sequence of puts, crashes in the middle of one, take-overs and reopenings agrees with a dictionary (T22).

Without crashes, but with growth and damage: tests/storage/test_state_machine.py.
"""

import errno
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from metaloom import storage
from metaloom.pipeline.types import LearnerState, TaskBatch, TaskParams, Update
from metaloom.storage import StageRef

REFS = st.builds(StageRef, st.integers(0, 3), st.sampled_from(("sample_tasks", "adapt", "meta_optimize")))
ABOUT = {"inputs": [], "seed_position": [], "started": 0.0, "seconds": 0.0}


def value_of(ref, number):
    if ref.stage == "sample_tasks":
        return TaskBatch(np.full((2, 1), float(number)), np.array([number, -1]), ("x",), ("m",))
    params = {"w": np.full((2, 3), number, np.float32)}
    return TaskParams(params) if ref.stage == "adapt" else Update(LearnerState(params), {"loss": float(number)})


class CrashingRun(RuleBasedStateMachine):
    write_points = None

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="crashes-"))
        self.path = self.folder / "run"
        self.model, self.writer = {}, None

    @initialize()
    def create(self):
        self.writer = storage.create_run(self.path, capacity=4, config={}, config_digest="", environment={})

    @precondition(lambda self: self.writer)
    @rule(ref=REFS, number=st.integers(0, 9))
    def put(self, ref, number):
        if ref not in self.model:
            self.writer.put(ref, value_of(ref, number), **ABOUT)
            self.writer.flush()
            self.model[ref] = number

    @precondition(lambda self: self.writer)
    @rule(ref=REFS, number=st.integers(0, 9), point=st.integers(0, 80))
    def crash_while_putting(self, ref, number, point):
        """Nothing that the writer does from some operation on has any effect, as if it had died there."""
        if ref in self.model:
            return
        done = False
        with self.write_points.before_each_write(self.write_points.fail_at(point, errno.EIO, for_ever=True)):
            try:
                self.writer.put(ref, value_of(ref, number), **ABOUT)
                self.writer.flush()
                done = True
                self.writer.close()
            except storage.StorageFailed:
                if not done:
                    with pytest.raises(storage.StorageFailed):
                        self.writer.close()
        self.writer = None
        run = storage.open_run(self.path)
        assert run.contains(ref) or not done
        if run.contains(ref):
            self.model[ref] = number

    @precondition(lambda self: self.writer)
    @rule(point=st.integers(0, 160))
    def crash_while_packing(self, point):
        with self.write_points.before_each_write(self.write_points.fail_at(point, errno.EIO, for_ever=True)):
            try:
                self.writer.pack()
                self.writer.close()
            except storage.StorageFailed:
                with suppress(storage.StorageFailed):
                    self.writer.close()
        self.writer = None
        self.read()

    @precondition(lambda self: not self.writer)
    @rule(point=st.integers(0, 40))
    def crash_while_opening(self, point):
        with self.write_points.before_each_write(self.write_points.fail_at(point, errno.EIO, for_ever=True)):
            try:
                self.writer = storage.open_writer(self.path)
            except storage.StorageFailed:
                return
        self.writer.close()
        self.writer = None

    @precondition(lambda self: not self.writer)
    @rule()
    def open(self):
        self.writer = storage.open_writer(self.path)
        assert all(self.writer.contains(ref) for ref in self.model)

    @precondition(lambda self: self.writer)
    @rule()
    def take_over(self):
        heir, zombie = storage.open_writer(self.path, take_over=True), self.writer
        zombie.close()
        self.writer = heir

    @precondition(lambda self: self.path.exists())
    @rule()
    def read(self):
        run = storage.open_run(self.path)
        assert run.refs() == sorted(self.model, key=run.stages.position)
        for ref, number in self.model.items():
            assert storage.digest(run.load(ref)) == storage.digest(value_of(ref, number))
        assert storage.verify_run(self.path) == []

    def teardown(self):
        if self.writer:
            self.writer.close()
        if self.path.exists():
            self.read()
        shutil.rmtree(self.folder)


@pytest.mark.slow
@pytest.mark.no_cover
def test_any_sequence_of_puts_and_crashes_agrees_with_a_dictionary(write_points, monkeypatch):
    monkeypatch.setattr(CrashingRun, "write_points", write_points)
    limits = settings(
        max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    run_state_machine_as_test(CrashingRun, settings=limits)
