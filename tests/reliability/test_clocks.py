"""Clocks that jump, stand still, run backwards or are past 2038 (T9): only the sequence number orders a run."""

import itertools
import time
from datetime import UTC, datetime, timedelta

import pytest

from metaloom import storage
from metaloom.storage.format import provenance

START = datetime(2026, 10, 25, 0, 59, 59, tzinfo=UTC)  # the hour in which summer time ends in Europe
CLOCKS = {
    "an hour back and forth": lambda n: START + timedelta(hours=(-1) ** n, seconds=n),
    "backwards": lambda n: START - timedelta(minutes=n),
    "standing still": lambda n: START,
    "past 2038": lambda n: datetime(2038, 1, 19, 3, 14, 7, tzinfo=UTC) + timedelta(seconds=n),
    "before 1970": lambda n: datetime(1969, 12, 31, 23, 59, tzinfo=UTC) + timedelta(seconds=n),
}


@pytest.fixture
def set_clock(monkeypatch):
    def use(clock):
        ticks = itertools.count()

        class Clock(datetime):
            @classmethod
            def now(cls, tz=None):
                return clock(next(ticks)).astimezone(tz)

        monkeypatch.setattr(provenance, "datetime", Clock)
        monkeypatch.setattr(time, "time", lambda: clock(next(ticks)).timestamp())

    return use


@pytest.mark.parametrize("clock", CLOCKS)
def test_no_clock_changes_a_digest_or_the_order_of_the_history(
    tmp_path, train_tiny, finish, digests, tiny_runs, set_clock, clock
):
    set_clock(CLOCKS[clock])
    path = train_tiny(tmp_path / "run")
    for stage in ("adapt", "meta_optimize"):
        (path / "_commits" / storage.StageRef(1, stage).file_name).unlink()
    finish(path)
    assert digests(path) == digests(tiny_runs(2))
    assert storage.verify_run(path) == []
    lineage = storage.open_run(path).lineage()
    sequences = lineage["sequence"].to_pylist()
    assert sequences == sorted(sequences)
    newest = lineage.slice(len(lineage) - 1).to_pylist()[0]
    assert (newest["stage"], newest["iteration"]) == ("meta_optimize", 1)
