"""A rollout batch on Dask workers: shards are submitted, awaited, and retried where they take too long.

The answers to a shard are equal bit for bit whoever gives them, so the first one counts.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from distributed import Client, Future, KilledWorker

from metaloom.flows.rollouts.backend import Traffic
from metaloom.flows.rollouts.connection import Connection, NoWorkerError, Patience, no_worker_for
from metaloom.flows.rollouts.flight_recorder import Recording
from metaloom.flows.rollouts.supervised import Collected, Shard, Supervision, collect_watched, num_bytes
from metaloom.pipeline.types import TaskParams

log: logging.Logger = logging.getLogger(__name__)

_STRAGGLES_AFTER_SECONDS = 5.0
_STRAGGLES_AFTER_TIMES = 4.0
_MOST_PARDONS = 10


@dataclass(frozen=True)
class Attempt:
    """One submission of a shard."""

    future: Future[Collected]
    watch: Supervision


@dataclass
class Piece:
    """A shard with its parameters, the attempts at it that have not failed, and how often it was wrongly blamed.

    Its answer also stays with a worker for as long as there is a reference to its future.
    """

    shard: Shard
    params: TaskParams
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    pardons: int = 0
    answer: Collected | None = None
    future: Future[Collected] | None = None


class ShardDied(Exception):
    """A shard killed every worker that tried it."""

    def __init__(self, shard: Shard, watch: Supervision) -> None:
        super().__init__(shard.position)
        self.shard: Shard = shard
        self.watch: Supervision = watch


@dataclass(frozen=True)
class Rounds:
    """State shared by the rollout batches of a session.

    Attributes:
        connection: Connection to the workers' scheduler.
        session: Distinguishes this trainer's work from others' at the same scheduler.
        traffic: Traffic so far.
        supervise: Makes the supervision of a shard; a second attempt beside the first has a separate one.
        recordings: Recordings of attempts that were begun and whose processes ended.
        losers: Attempts whose shard was answered by another, and which still run.
    """

    connection: Connection
    session: str
    supervise: Callable[[], Supervision]
    recordings: Callable[[Supervision], Sequence[Recording]]
    traffic: Traffic = field(default_factory=Traffic)
    losers: list[Future[Collected]] = field(default_factory=list[Future[Collected]])

    @property
    def client(self) -> Client:
        """Of the scheduler."""
        return self.connection.client

    def collect(self, pieces: Sequence[Piece]) -> list[Collected]:
        """Return the shards' answers in their order.

        Raises:
            ShardDied: one killed its workers.
            RolloutError: the environment failed.
            WorkersError: there has been no worker for long, or one has other versions.
            CancelledError: the scheduler is gone.
        """
        # Dropping the last reference would have the scheduler take a worker for free that is not.
        self.losers[:] = [future for future in self.losers if not future.done()]
        try:
            for piece in pieces:
                self.submit(piece)
            straggling = _Stragglers(self)
            patience = Patience(self.client, pieces[0].attempts[0].watch.step_timeout_seconds)
            while waiting := [piece for piece in pieces if piece.answer is None]:  # answers are fetched as they come
                if patience.any_done([attempt.future for piece in waiting for attempt in piece.attempts]):
                    straggling.answered(self._gather_done(waiting))
                else:
                    straggling.submit_again(waiting)
        finally:
            # After an error the others' work is of no use, and holds the workers.
            self.client.cancel([a.future for p in pieces if p.answer is None for a in p.attempts])
        return [cast(Collected, piece.answer) for piece in pieces]

    def submit(self, piece: Piece, workers: Sequence[str] | None = None, *, watch: Supervision | None = None) -> None:
        """Send a shard to the workers, preferably to some of them; as one more attempt of a watch that there is."""
        self.traffic.submitted += 1
        self.traffic.sent_bytes += num_bytes((piece.shard.tasks, piece.params))
        watch = watch or self.supervise()
        future = self.client.submit(
            collect_watched,
            piece.shard,
            piece.params,
            watch,
            # Never the key of another run or of an earlier attempt, whose result a scheduler may still know.
            key=f"{piece.shard.name}-{self.session}-{self.traffic.submitted}",
            # Dask names pure work by its arguments; hashing megabytes to save nothing is a waste.
            pure=False,
            workers=workers,
            allow_other_workers=workers is not None,
        )
        piece.attempts.append(Attempt(future, watch))

    def _gather_done(self, waiting: Sequence[Piece]) -> list[float]:
        """Fetch what is there; returns the seconds that it took the workers."""
        self._drop_failed(waiting)
        # Not merely done: one may have failed since, beside another that continues.
        first = ((p, next((a for a in p.attempts if a.future.status == "finished"), None)) for p in waiting)
        answered = [(piece, attempt) for piece, attempt in first if attempt is not None]
        try:
            answers = cast(list[Collected], self.client.gather([attempt.future for _, attempt in answered]))
        except KilledWorker:  # its answer went with its worker; such an attempt has failed, and is dropped next time
            return []
        for (piece, chosen), answer in zip(answered, answers, strict=True):
            piece.answer, piece.future = answer, chosen.future
            self.traffic.received_bytes += num_bytes(answer)
            self.losers.extend(a.future for a in piece.attempts if a is not chosen and not a.future.done())
            piece.attempts.clear()
        return [answer.seconds for answer in answers]

    def _drop_failed(self, waiting: Sequence[Piece]) -> None:
        """Forget attempts whose workers died while another attempt continues; raise any other failure."""
        for piece in waiting:
            for attempt in [a for a in piece.attempts if a.future.status in ("error", "cancelled")]:
                try:
                    attempt.future.result()
                except KilledWorker as error:
                    piece.attempts.remove(attempt)
                    if not piece.attempts:
                        self._after_deaths(piece, attempt, error)
                except NoWorkerError as error:  # the scheduler's own patience is at its end
                    raise no_worker_for(error.timeout) from None

    def _after_deaths(self, piece: Piece, attempt: Attempt, error: KilledWorker) -> None:
        """Submit a shard again of which Dask says that it killed its workers, unless it did."""
        # Dask blames every task that a dead worker had been given, also tasks that only waited for another to end.
        begun = len(self.recordings(attempt.watch))
        if begun > error.allowed_failures or piece.pardons >= _MOST_PARDONS:
            raise ShardDied(piece.shard, attempt.watch) from error
        piece.pardons += 1
        self.submit(piece, watch=attempt.watch)


class _Stragglers:
    """Finds shards that take much longer than others while there are workers without work."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._longest: float | None = None
        self._idle_since: float | None = None

    def answered(self, seconds: Sequence[float]) -> None:
        self._longest = max([*seconds, self._longest or 0.0])
        self._idle_since = None

    def submit_again(self, waiting: Sequence[Piece]) -> None:
        """Submit shards again that idle workers have watched for long, one for each such worker."""
        idle: list[str] = []  # workers with fewer tasks than threads, once for every free thread
        if self._longest is not None:
            busy = cast(dict[str, tuple[object, ...]], self._rounds.client.processing())
            threads = cast(dict[str, int], self._rounds.client.nthreads())
            idle = [worker for worker, number in threads.items() for _ in range(number - len(busy.get(worker, ())))]
        if not idle:
            self._idle_since = None
            return
        self._idle_since = self._idle_since or time.monotonic()
        patience = max(_STRAGGLES_AFTER_SECONDS, _STRAGGLES_AFTER_TIMES * (self._longest or 0.0))
        if time.monotonic() - self._idle_since < patience:
            return
        for piece, worker in zip([p for p in waiting if len(p.attempts) == 1], idle, strict=False):
            log.warning("%s takes longer than the others; another worker does it as well", piece.shard.name)
            self._rounds.traffic.repeated += 1
            self._rounds.submit(piece, [worker])


def pieces_of(whole: Shard, params: TaskParams, bounds: Sequence[tuple[int, int]]) -> list[Piece]:
    """Divide a rollout batch into pieces."""
    first = whole.position.first_task
    return [
        Piece(
            replace(
                whole, tasks=whole.tasks.slice(*ends), position=replace(whole.position, first_task=first + ends[0])
            ),
            params.slice(*ends),
        )
        for ends in bounds
    ]
