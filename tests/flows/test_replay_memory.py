import tracemalloc
from collections import Counter

import numpy as np
import pytest

from metaloom.flows.graph.replay_memory import ReplayMemory, blocks_within
from metaloom.pipeline.replay.columns import TransitionColumns
from metaloom.pipeline.replay.index import ReplayError
from metaloom.pipeline.types import EpisodeBatch, Minibatches
from metaloom.storage import StageRef

COLUMNS = TransitionColumns(observation_size=3, action_size=2)
CHOICES = TransitionColumns(observation_size=3, action_size=0)
EVERYTHING = 1 << 20


def ref(number: int) -> StageRef:
    return StageRef(number // 2, "collect_rollouts", number % 2)


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
        self.batches = {ref(n): batch(n, columns, **about) for n in range(count)}
        self.columns = columns
        self.reads = Counter()

    def load(self, ref: StageRef) -> EpisodeBatch:
        self.reads[ref] += 1
        return self.batches[ref]

    def memory(self, *, rows: int | None = None, seen: bool = True, **about) -> ReplayMemory:
        """A memory of all rounds with a cache for so many rows, half of which is for old ones."""
        cache_bytes = EVERYTHING if rows is None else rows * self.columns.row_bytes
        memory = ReplayMemory(self.load, self.columns, cache_bytes=cache_bytes, max_rows=10_000, **about)
        for ref, episodes in self.batches.items():
            if seen:
                memory.extend(ref, [0, 1], episodes, in_context=True)
            else:
                memory.extend_stored(ref, [0, 1], episodes.lengths, in_context=True)
        return memory


def chosen(num_rows: int, *, first: int = 0, U: int = 5, N: int = 7, C: int = 0) -> Minibatches:
    rng = np.random.default_rng(0)
    rows = rng.integers(first, num_rows, (U, 2, N))
    return Minibatches(rows, np.zeros((U, 2), np.int64), rng.integers(0, num_rows, (U, 2, C)) if C else None)


def content(minibatches) -> list[bytes]:
    parts = [part for m in minibatches for part in (m.transitions, m.context) if part is not None]
    return [array.tobytes() for part in parts for array in vars(part).values()]


@pytest.mark.parametrize("columns", [COLUMNS, CHOICES])
def test_minibatches_hold_the_steps_of_the_batches(columns) -> None:
    rounds = Rounds(6, columns)
    steps = [
        (b.observations[i, e, t], b.actions[i, e, t], b.rewards[i, e, t], b.observations[i, e, t + 1],
         bool(b.terminated[i, e]) and t == b.lengths[i, e] - 1)
        for b in rounds.batches.values() for i in range(2) for e in range(2) for t in range(b.lengths[i, e])
    ]  # fmt: skip
    assert any(step[4] for step in steps)
    choice = chosen(len(steps), C=3)
    gathered = list(rounds.memory().minibatches(choice))
    assert len(gathered) == 5
    for u, minibatch in enumerate(gathered):
        for transitions, rows in ((minibatch.transitions, choice.rows[u]), (minibatch.context, choice.context_rows[u])):
            for place, name in enumerate(vars(transitions)):
                expected = np.array([[steps[row][place] for row in of_task] for of_task in rows])
                assert np.array_equal(getattr(transitions, name), expected), name


@pytest.mark.parametrize("columns", [COLUMNS, CHOICES])
@pytest.mark.parametrize("cache_rows", [2, 5, 20, 61, 130, 200])
@pytest.mark.parametrize("seen", [True, False])
def test_hot_or_cold_the_bits_are_the_same(columns, cache_rows: int, seen: bool) -> None:
    rounds = Rounds(10, columns)
    choice = chosen(90, C=4)
    assert content(rounds.memory(rows=cache_rows, seen=seen).minibatches(choice)) == content(
        rounds.memory().minibatches(choice)
    )


def test_nothing_is_read_while_everything_is_in_memory() -> None:
    rounds = Rounds(10)
    list(rounds.memory().minibatches(chosen(90)))
    assert not rounds.reads


def test_a_round_that_was_not_seen_is_read_once_and_only_if_it_is_asked_for() -> None:
    rounds = Rounds(10)
    memory = rounds.memory(seen=False)
    choice = Minibatches(np.array([[[0, 3, 40]], [[4, 42, 41]], [[-1, -1, -1]]]), np.array([[0], [0], [-1]]))
    for _ in range(2):
        assert len(list(memory.minibatches(choice))) == 2
        # A round has 9 steps: rows 0 to 4 are of round 0, 40 to 42 of round 4.
        assert rounds.reads == {ref(0): 1, ref(4): 1}


def test_old_rounds_are_read_once_per_block_of_gradient_steps() -> None:
    rounds = Rounds(10)
    # 30 rows may be old, 30 are in the window: 0 to 59 are old.
    memory = rounds.memory(rows=60)
    rows = np.tile([0, 9, 18, 27, 89], (8, 1, 1))
    list(memory.minibatches(Minibatches(rows, np.zeros((8, 1), np.int64))))
    # 4 old rows per step, so 7 of the 8 steps in the first block.
    assert rounds.reads == dict.fromkeys(map(ref, range(4)), 2)


def test_a_resumed_memory_goes_on_like_one_that_saw_everything() -> None:
    rounds = Rounds(10)
    seen, resumed = rounds.memory(rows=64), rounds.memory(rows=64, seen=False)
    for number in range(10, 20):
        for memory in (seen, resumed):
            memory.extend(ref(number), [0, 1], batch(number), in_context=True)
        rounds.batches[ref(number)] = batch(number)
        newest = chosen(9 * number + 9, first=9 * number - 60, N=3)
        assert content(resumed.minibatches(newest)) == content(seen.minibatches(newest))
    # The window holds 32 rows, and all of them were seen by now.
    rounds.reads.clear()
    list(resumed.minibatches(chosen(180, first=148)))
    assert not rounds.reads


def test_only_context_shows_other_rewards() -> None:
    rounds = Rounds(4)
    plain = list(rounds.memory().minibatches(chosen(36, C=3)))
    sparse = list(rounds.memory(context_rewards=lambda rewards: np.maximum(rewards, 0)).minibatches(chosen(36, C=3)))
    assert min(m.context.rewards.min() for m in plain) < 0
    for a, b in zip(plain, sparse, strict=True):
        assert np.array_equal(b.context.rewards, np.maximum(a.context.rewards, 0))
        assert np.array_equal(b.transitions.rewards, a.transitions.rewards)


def test_no_more_is_held_than_the_cache_allows() -> None:
    columns = TransitionColumns(observation_size=60, action_size=1)
    lengths = ((500,),)

    def load(ref: StageRef) -> EpisodeBatch:
        return batch(ref.iteration, columns, lengths)

    memory = ReplayMemory(load, columns, cache_bytes=1_000_000, max_rows=10**6)
    choice = chosen(40 * 500, U=20, N=250)
    loaded = 500 * 61 * 4 * 3  # a batch of 0.12 MB while it is read, and what selecting its steps takes
    tracemalloc.start()
    try:
        for i in range(40):
            memory.extend_stored(StageRef(i, "collect_rollouts", 0), [0], np.int32(lengths), in_context=False)
        for _ in memory.minibatches(choice):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    minibatch = 2 * 500 * columns.row_bytes
    # All that is chosen together has 10 MB.
    assert 500_000 < peak < 1_000_000 + minibatch + loaded + 4 * choice.rows.nbytes


def test_memory_is_set_aside_for_no_more_rows_than_can_be_drawn() -> None:
    memory = ReplayMemory(Rounds(0).load, COLUMNS, cache_bytes=1 << 50, max_rows=100)
    memory.extend(ref(0), [0, 1], batch(0), in_context=False)
    assert len(list(memory.minibatches(chosen(9)))) == 5


def test_a_cache_that_is_too_small_is_refused() -> None:
    with pytest.raises(ReplayError, match=f"required at least {2 * COLUMNS.row_bytes}"):
        Rounds(1).memory(rows=1)


def test_rows_of_rounds_that_are_missing_are_refused() -> None:
    with pytest.raises(ReplayError, match=r"rows .* to 99; the memory has 0 to 8"):
        next(Rounds(1).memory().minibatches(Minibatches(np.array([[[3, 99]]]), np.array([[0]]))))


def test_a_stored_batch_with_other_steps_than_it_was_said_to_have_is_refused() -> None:
    rounds = Rounds(2)
    memory = rounds.memory(seen=False)
    rounds.batches[ref(1)] = batch(1, lengths=((4, 2), (2, 0)))
    with pytest.raises(ReplayError, match=r"collect_rollouts\(i=0, k=1\) holds 8 steps, .* with 9 of it"):
        next(memory.minibatches(chosen(18)))


def test_extending_while_minibatches_are_taken_is_refused() -> None:
    memory = Rounds(2).memory()
    minibatches = memory.minibatches(chosen(18))
    next(minibatches)
    memory.extend(ref(2), [0, 1], batch(2), in_context=False)
    with pytest.raises(ReplayError, match="was extended while"):
        next(minibatches)


def test_blocks_are_as_long_as_the_limit_allows_and_never_empty() -> None:
    def split(counts, limit: int) -> list[tuple[int, int]]:
        return [(block.start, block.stop) for block in blocks_within(np.array(counts), limit)]

    assert split([2, 2, 2, 2, 2], 4) == [(0, 2), (2, 4), (4, 5)]
    assert split([9, 1, 1], 4) == [(0, 1), (1, 3)]
    assert split([0, 0, 0], 1) == [(0, 3)]
    assert split([], 1) == []
