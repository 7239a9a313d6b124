"""A rollout batch on Dask workers: shards are submitted, awaited, and resubmitted if they take too long.

All results of a shard are equal bit for bit, so the first one is used.
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
    """A shard with its parameters, pending attempts, and the number of wrongly attributed failures.

    Its result stays on a worker while there is a reference to its future.
    """

    shard: Shard
    params: TaskParams
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    pardons: int = 0
    answer: Collected | None = None
    future: Future[Collected] | None = None


class ShardDied(Exception):
    """Raised for a shard that killed every worker that tried it."""

    def __init__(self, shard: Shard, watch: Supervision) -> None:
        super().__init__(shard.position)
        self.shard: Shard = shard
        self.watch: Supervision = watch


@dataclass(frozen=True)
class Rounds:
    """State shared by the rollout batches of a session.

    Attributes:
        connection: Connection to the workers' scheduler.
        session: Name that distinguishes this trainer's work at the scheduler.
        traffic: Traffic so far.
        supervise: Function that makes the supervision of a shard; concurrent attempts have separate ones.
        recordings: Recordings of attempts whose processes ended.
        losers: Running attempts whose shard is already done.
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
        """Return the shards' results in order.

        Raises:
            ShardDied: a shard killed its workers.
            RolloutError: the environment failed.
            WorkersError: there has been no worker for too long, or one has other versions.
            CancelledError: the scheduler was lost.
        """
        # Dropping the last reference would make the scheduler consider a busy worker free.
        self.losers[:] = [future for future in self.losers if not future.done()]
        try:
            for piece in pieces:
                self.submit(piece)
            straggling = _Stragglers(self)
            patience = Patience(self.client, pieces[0].attempts[0].watch.step_timeout_seconds)
            while waiting := [piece for piece in pieces if piece.answer is None]:  # results are fetched as they arrive
                if patience.any_done([attempt.future for piece in waiting for attempt in piece.attempts]):
                    straggling.answered(self._gather_done(waiting))
                else:
                    straggling.submit_again(waiting)
        finally:
            # After an error, cancel the other work, which would occupy workers.
            self.client.cancel([a.future for p in pieces if p.answer is None for a in p.attempts])
        return [cast(Collected, piece.answer) for piece in pieces]

    def submit(self, piece: Piece, workers: Sequence[str] | None = None, *, watch: Supervision | None = None) -> None:
        """Submit a shard, preferably to the given workers; with `watch`, as another attempt under it."""
        self.traffic.submitted += 1
        self.traffic.sent_bytes += num_bytes((piece.shard.tasks, piece.params))
        watch = watch or self.supervise()
        future = self.client.submit(
            collect_watched,
            piece.shard,
            piece.params,
            watch,
            # Keys must be unique across runs and attempts, since a scheduler may remember results.
            key=f"{piece.shard.name}-{self.session}-{self.traffic.submitted}",
            # Dask derives keys of pure work from its arguments; avoid hashing megabytes.
            pure=False,
            workers=workers,
            allow_other_workers=workers is not None,
        )
        piece.attempts.append(Attempt(future, watch))

    def _gather_done(self, waiting: Sequence[Piece]) -> list[float]:
        """Fetch finished results; return the seconds they took on workers."""
        self._drop_failed(waiting)
        # Not merely done: an attempt may have failed while another continues.
        first = ((p, next((a for a in p.attempts if a.future.status == "finished"), None)) for p in waiting)
        answered = [(piece, attempt) for piece, attempt in first if attempt is not None]
        try:
            answers = cast(list[Collected], self.client.gather([attempt.future for _, attempt in answered]))
        except KilledWorker:  # its result was lost with its worker; the attempt has failed and will be dropped
            return []
        for (piece, chosen), answer in zip(answered, answers, strict=True):
            piece.answer, piece.future = answer, chosen.future
            self.traffic.received_bytes += num_bytes(answer)
            self.losers.extend(a.future for a in piece.attempts if a is not chosen and not a.future.done())
            piece.attempts.clear()
        return [answer.seconds for answer in answers]

    def _drop_failed(self, waiting: Sequence[Piece]) -> None:
        """Drop attempts whose workers died while another attempt continues; raise other failures."""
        for piece in waiting:
            for attempt in [a for a in piece.attempts if a.future.status in ("error", "cancelled")]:
                try:
                    attempt.future.result()
                except KilledWorker as error:
                    piece.attempts.remove(attempt)
                    if not piece.attempts:
                        self._after_deaths(piece, attempt, error)
                except NoWorkerError as error:  # the scheduler gave up
                    raise no_worker_for(error.timeout) from None

    def _after_deaths(self, piece: Piece, attempt: Attempt, error: KilledWorker) -> None:
        """Resubmit a shard that Dask wrongly blames for the death of its workers."""
        # Dask blames all tasks assigned to a dead worker, including waiting ones.
        begun = len(self.recordings(attempt.watch))
        if begun > error.allowed_failures or piece.pardons >= _MOST_PARDONS:
            raise ShardDied(piece.shard, attempt.watch) from error
        piece.pardons += 1
        self.submit(piece, watch=attempt.watch)


class _Stragglers:
    """Finds shards that take much longer than others while workers are idle."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._longest: float | None = None
        self._idle_since: float | None = None

    def answered(self, seconds: Sequence[float]) -> None:
        self._longest = max([*seconds, self._longest or 0.0])
        self._idle_since = None

    def submit_again(self, waiting: Sequence[Piece]) -> None:
        """Resubmit slow shards to idle workers, one for each."""
        idle: list[str] = []  # workers with free threads, once per free thread
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
    """Divide a rollout batch into shards."""
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
