"""Totals of what went between the trainer and its workers."""

from dataclasses import dataclass


@dataclass
class Traffic:
    """Totals of a session.

    Attributes:
        submitted: shards that were sent to workers, those that were sent again among them.
        repeated: of these, shards sent a second time because the first attempt took too long.
        sent_bytes, received_bytes: of the parameters and tasks of shards, and of their episodes.
        threads: that workers have now, all together.
    """

    submitted: int = 0
    repeated: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    threads: int = 0
