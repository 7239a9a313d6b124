"""Clocks order nothing: only the sequence of records does."""

import time

import pytest

from metaloom import storage
from metaloom.storage.format import provenance


@pytest.mark.parametrize(
    "clock",
    [
        lambda n: 1.8e9 - 3600 * n,  # backwards, an hour each time
        lambda n: 1.8e9 + 3600 * (-1) ** n,  # to and fro, as when daylight saving time is set by hand
        lambda n: 1.8e9,  # standing still
        lambda n: 2.3e9 + n,  # behind 2038
        lambda n: -86400.0 * n,  # before 1970
    ],
    ids=["backwards", "to and fro", "standing still", "behind 2038", "before 1970"],
)
def test_a_run_written_under_any_clock_has_its_order_and_is_whole(tmp_path, creation, batches, monkeypatch, clock):
    outputs = [output for i in range(2) for output in batches.iteration(i)]
    original = provenance.utc
    moments = iter(range(10**6))
    monkeypatch.setattr(time, "time", lambda: clock(next(moments)))
    for module in ("sessions", "creation", "holder"):
        monkeypatch.setattr(f"metaloom.storage.write.{module}.utc", lambda seconds=None: original(time.time()))
    with storage.create_run(tmp_path / "run", capacity=2, **creation) as writer:
        for n, (ref, value, inputs) in enumerate(outputs):
            writer.put(ref, value, inputs=inputs, seed_position=(), started=clock(n), seconds=0.0)
            if n == 9:
                writer.thin([0])
    with storage.open_writer(tmp_path / "run"):
        pass
    run = storage.open_run(tmp_path / "run")
    order = [(row["iteration"], row["stage"], row["step"]) for row in run.lineage().to_pylist()]
    assert order == [(ref.iteration, ref.stage, ref.step) for ref, _, _ in outputs]
    assert storage.verify_run(tmp_path / "run") == []
    fork = storage.fork_run(run, 1, tmp_path / "fork", capacity=1, **creation)
    assert storage.verify_run(fork.path) == []
