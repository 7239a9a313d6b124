"""A rollout batch on Dask workers: shards are submitted and awaited."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from distributed import Client, Future, KilledWorker

from metaloom.flows.rollouts.backend import Traffic
from metaloom.flows.rollouts.connection import Connection, NoWorkerError, Patience, no_worker_for
from metaloom.flows.rollouts.flight_recorder import Recording
from metaloom.flows.rollouts.supervised import Collected, Shard, Supervision, collect_watched, num_bytes
from metaloom.pipeline.types import TaskParams

_MOST_PARDONS = 10


@dataclass
class Piece:
    """A shard with its parameters, the attempt at it, and how often it was wrongly blamed.

    Its result stays on a worker while there is a reference to its future.
    """

    shard: Shard
    params: TaskParams
    watch: Supervision
    future: "Future[Collected] | None" = None
    pardons: int = 0
    answer: Collected | None = None


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
        supervise: Makes the supervision of a piece of work.
        recordings: Recordings of attempts whose processes ended.
    """

    connection: Connection
    session: str
    supervise: Callable[[], Supervision]
    recordings: Callable[[Supervision], Sequence[Recording]]
    traffic: Traffic = field(default_factory=Traffic)

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
        try:
            for piece in pieces:
                self._submit(piece)
            patience = Patience(self.client, pieces[0].watch.step_timeout_seconds)
            while waiting := [piece for piece in pieces if piece.answer is None]:  # results are fetched as they arrive
                if patience.any_done([cast(Future[Collected], piece.future) for piece in waiting]):
                    self._gather_done(waiting)
        finally:
            # After an error, cancel the other work, which would occupy workers.
            self.client.cancel([piece.future for piece in pieces if piece.answer is None and piece.future is not None])
        return [cast(Collected, piece.answer) for piece in pieces]

    def _submit(self, piece: Piece) -> None:
        self.traffic.submitted += 1
        self.traffic.sent_bytes += num_bytes((piece.shard.tasks, piece.params))
        piece.future = self.client.submit(
            collect_watched,
            piece.shard,
            piece.params,
            piece.watch,
            # Keys must be unique across runs and attempts, since a scheduler may remember results.
            key=f"{piece.shard.name}-{self.session}-{self.traffic.submitted}",
            # Dask derives keys of pure work from its arguments; avoid hashing megabytes.
            pure=False,
        )

    def _gather_done(self, waiting: Sequence[Piece]) -> None:
        """Fetch the answers that are there; submit shards again that Dask wrongly blames, and raise other failures."""
        done: list[Piece] = []
        for piece in waiting:
            assert piece.future is not None
            if (status := piece.future.status) in ("error", "cancelled"):
                self._after_failure(piece, piece.future)
            elif status == "finished":
                done.append(piece)
        try:
            answers = cast(list[Collected], self.client.gather([piece.future for piece in done]))
        except KilledWorker:  # an answer went with its worker; such an attempt has failed, which is seen next time
            return
        for piece, answer in zip(done, answers, strict=True):
            piece.answer = answer
            self.traffic.received_bytes += num_bytes(answer)

    def _after_failure(self, piece: Piece, future: Future[Collected]) -> None:
        try:
            future.result()
        except KilledWorker as error:
            # Dask blames all tasks assigned to a dead worker, including waiting ones.
            begun = len(self.recordings(piece.watch))
            if begun > error.allowed_failures or piece.pardons >= _MOST_PARDONS:
                raise ShardDied(piece.shard, piece.watch) from error
            piece.pardons += 1
            self.traffic.repeated += 1
            self._submit(piece)
        except NoWorkerError as error:  # the scheduler gave up
            raise no_worker_for(error.timeout) from None


def pieces_of(
    whole: Shard, params: TaskParams, bounds: Sequence[tuple[int, int]], supervise: Callable[[], Supervision]
) -> list[Piece]:
    """Divide a rollout batch into shards."""
    first = whole.position.first_task
    return [
        Piece(
            replace(
                whole, tasks=whole.tasks.slice(*ends), position=replace(whole.position, first_task=first + ends[0])
            ),
            params.slice(*ends),
            supervise(),
        )
        for ends in bounds
    ]
