import tracemalloc
from collections import Counter

import numpy as np
import pytest

from metaloom.pipeline.replay.buffer import ReplayBuffer, TransitionColumns, blocks_within
from metaloom.pipeline.replay.index import ReplayError
from metaloom.pipeline.types import EpisodeBatch, Minibatch, Minibatches

COLUMNS = TransitionColumns(observation_size=3, action_size=2)
DISCRETE = TransitionColumns(observation_size=3, action_size=0)
EVERYTHING = 1 << 20


def batch(number: int, columns: TransitionColumns = COLUMNS, lengths=((4, 2), (3, 0))) -> EpisodeBatch:
    """A round of random episodes; the same number gives the same round."""
    rng = np.random.default_rng(number)
    lengths = np.int32(lengths)
    B, E, T = *lengths.shape, int(lengths.max())
    real = np.arange(T) < lengths[..., None]
    O, A = columns.observation_size, columns.action_size
    return EpisodeBatch(
        observations=rng.standard_normal((B, E, T + 1, O), dtype=np.float32),
        actions=rng.standard_normal((B, E, T, A), dtype=np.float32) if A else rng.integers(0, 5, (B, E, T)),
        rewards=np.where(real, rng.standard_normal((B, E, T), dtype=np.float32), np.float32(0)),
        terminated=rng.random((B, E)) < 0.5 * (lengths > 0),
        truncated=np.zeros((B, E), bool),
        lengths=lengths,
        behavior={},
        reward_terms={},
        initial_state=np.zeros((B, E, 0)),
    )


class Rounds:
    """Stands for the store, and counts what is read from it."""

    def __init__(self, count: int, columns: TransitionColumns = COLUMNS, **about) -> None:
        self.batches = [batch(n, columns, **about) for n in range(count)]
        self.columns = columns
        self.reads = Counter()

    def read(self, number: int) -> EpisodeBatch:
        self.reads[number] += 1
        return self.batches[number]

    def buffer(self, *, rows: int | None = None, max_rows: int = 10_000) -> ReplayBuffer:
        """A buffer of all rounds with a cache for so many rows, half of which is for old ones."""
        cache_bytes = EVERYTHING if rows is None else rows * self.columns.row_bytes
        buffer = ReplayBuffer(self.columns, cache_bytes=cache_bytes, max_rows=max_rows)
        for episodes in self.batches:
            buffer.append(episodes.lengths)
        return buffer

    def minibatches(self, drawn: Minibatches, **about) -> list[Minibatch]:
        return list(self.buffer(**about).minibatches(drawn, self.read))


def draw(num_rows: int, *, first: int = 0, U: int = 5, N: int = 7, C: int = 0) -> Minibatches:
    rng = np.random.default_rng(0)
    rows = rng.integers(first, num_rows, (U, 2, N))
    return Minibatches(rows, np.zeros((U, 2), np.int64), rng.integers(0, num_rows, (U, 2, C)) if C else None)


def content(minibatches) -> list[bytes]:
    parts = [part for m in minibatches for part in (m.transitions, m.context) if part is not None]
    return [array.tobytes() for part in parts for array in vars(part).values()]


@pytest.mark.parametrize("columns", [COLUMNS, DISCRETE])
def test_minibatches_hold_the_steps_of_the_batches(columns) -> None:
    rounds = Rounds(6, columns)
    steps = [
        (b.observations[i, e, t], b.actions[i, e, t], b.rewards[i, e, t], b.observations[i, e, t + 1],
         bool(b.terminated[i, e]) and t == b.lengths[i, e] - 1)
        for b in rounds.batches for i in range(2) for e in range(2) for t in range(b.lengths[i, e])
    ]  # fmt: skip
    assert any(step[4] for step in steps)
    drawn = draw(len(steps), C=3)
    gathered = rounds.minibatches(drawn)
    assert len(gathered) == 5
    for u, minibatch in enumerate(gathered):
        for transitions, rows in ((minibatch.transitions, drawn.rows[u]), (minibatch.context, drawn.context_rows[u])):
            for n, name in enumerate(vars(transitions)):
                expected = np.array([[steps[row][n] for row in of_task] for of_task in rows])
                assert np.array_equal(getattr(transitions, name), expected), name


@pytest.mark.parametrize("columns", [COLUMNS, DISCRETE])
@pytest.mark.parametrize("cache_rows", [2, 5, 20, 61, 130, 200])
@pytest.mark.parametrize("seen", [True, False])
def test_the_size_of_the_cache_changes_no_bit(columns, cache_rows: int, seen: bool) -> None:
    rounds = Rounds(10, columns)
    drawn = draw(90, C=4)
    buffer = rounds.buffer(rows=cache_rows)
    if seen:
        list(buffer.minibatches(draw(90, first=50), rounds.read))
    assert content(buffer.minibatches(drawn, rounds.read)) == content(rounds.minibatches(drawn))


def test_a_round_is_read_once_and_only_if_a_row_of_it_is_drawn() -> None:
    rounds = Rounds(10)
    buffer = rounds.buffer()
    drawn = Minibatches(np.array([[[0, 36, 40]], [[0, 42, 41]], [[-1, -1, -1]]]), np.array([[0], [0], [-1]]))
    for _ in range(2):
        assert [minibatch.context for minibatch in buffer.minibatches(drawn, rounds.read)] == [None, None]
        # A round has 9 steps: row 0 is of round 0, 36 to 42 are of round 4.
        assert rounds.reads == {0: 1, 4: 1}


def test_nothing_is_read_until_minibatches_are_taken() -> None:
    rounds = Rounds(10)
    rounds.buffer().minibatches(draw(90), rounds.read)
    assert not rounds.reads


def test_old_rounds_are_read_once_per_block_of_gradient_steps() -> None:
    rounds = Rounds(10)
    # 30 rows may be old, 30 are among the newest: 0 to 59 are old.
    rows = np.tile([0, 9, 18, 27, 89], (8, 1, 1))
    rounds.minibatches(Minibatches(rows, np.zeros((8, 1), np.int64)), rows=60, max_rows=80)
    # 4 old rows per step, so 7 of the 8 steps in the first block.
    assert rounds.reads == {**dict.fromkeys(range(4), 2), 9: 1}


def test_a_buffer_that_learned_all_along_goes_on_like_one_that_is_new() -> None:
    rounds = Rounds(10)
    learning = rounds.buffer(rows=64)
    for number in range(10, 20):
        rounds.batches.append(batch(number))
        learning.append(batch(number).lengths)
        newest = draw(9 * number + 9, first=9 * number - 60, N=3)
        expected = content(rounds.minibatches(newest, rows=64))
        assert content(learning.minibatches(newest, rounds.read)) == expected
    # The newest 32 rows are those of the last four rounds, which were drawn from.
    assert len(list(learning.minibatches(draw(180, first=148), rounds.read))) == 5
    rounds.reads.clear()
    list(learning.minibatches(draw(180, first=148), rounds.read))
    assert not rounds.reads


def test_no_more_is_held_than_the_cache_allows() -> None:
    columns = TransitionColumns(observation_size=60, action_size=1)
    lengths = ((500,),)
    buffer = ReplayBuffer(columns, cache_bytes=1_000_000, max_rows=10**6)
    drawn = draw(40 * 500, U=20, N=250)
    loaded = 500 * 61 * 4 * 3  # a batch of 0.12 MB while it is read, and what selecting its steps takes
    tracemalloc.start()
    try:
        for _ in range(40):
            buffer.append(np.int32(lengths))
        for _ in buffer.minibatches(drawn, lambda number: batch(number, columns, lengths)):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    minibatch = 2 * 500 * columns.row_bytes
    # All that is drawn together has 10 MB.
    assert 500_000 < peak < 1_000_000 + minibatch + loaded + 4 * drawn.rows.nbytes


def test_memory_is_set_aside_for_no_more_rows_than_can_be_drawn() -> None:
    buffer = ReplayBuffer(COLUMNS, cache_bytes=1 << 50, max_rows=100)
    buffer.append(batch(0).lengths)
    assert len(list(buffer.minibatches(draw(9), batch))) == 5


def test_a_cache_that_is_too_small_is_refused() -> None:
    with pytest.raises(ReplayError, match=f"needs at least {2 * COLUMNS.row_bytes}"):
        Rounds(1).buffer(rows=1)


def test_rows_of_rounds_that_are_missing_are_refused() -> None:
    with pytest.raises(ReplayError, match=r"rows from 3 to 99; the replay buffer has 0 to 8"):
        Rounds(1).minibatches(Minibatches(np.array([[[3, 99]]]), np.array([[0]])))


def test_a_round_with_other_steps_than_it_was_said_to_have_is_refused() -> None:
    rounds = Rounds(2)
    buffer = rounds.buffer()
    rounds.batches[1] = batch(1, lengths=((4, 2), (2, 0)))
    with pytest.raises(ReplayError, match=r"rollout batch 1 holds 8 steps, .* with 9"):
        next(buffer.minibatches(draw(18), rounds.read))


def test_growing_while_minibatches_are_taken_is_refused() -> None:
    rounds = Rounds(2)
    buffer = rounds.buffer()
    minibatches = buffer.minibatches(draw(18), rounds.read)
    next(minibatches)
    buffer.append(batch(2).lengths)
    with pytest.raises(ReplayError, match="grew while"):
        next(minibatches)


def test_blocks_are_as_long_as_the_limit_allows_and_never_empty() -> None:
    def split(counts, limit: int) -> list[tuple[int, int]]:
        return [(block.start, block.stop) for block in blocks_within(np.array(counts), limit)]

    assert split([2, 2, 2, 2, 2], 4) == [(0, 2), (2, 4), (4, 5)]
    assert split([9, 1, 1], 4) == [(0, 1), (1, 3)]
    assert split([0, 0, 0], 1) == [(0, 3)]
    assert split([], 1) == []
