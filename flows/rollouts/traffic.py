"""Totals of the traffic between the trainer and its workers."""

from dataclasses import dataclass


@dataclass
class Traffic:
    """Totals of a session.

    Attributes:
        submitted: Shards sent to workers, including retries.
        repeated: Shards sent a second time because the first attempt took too long.
        sent_bytes, received_bytes: Bytes of parameters and tasks sent, and of episodes received.
        threads: Total number of worker threads now.
    """

    submitted: int = 0
    repeated: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    threads: int = 0
