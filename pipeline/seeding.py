"""A run's random streams, each derived only from its purpose and position.

A stream is identified by (run seed, stream name, iteration, inner step, task, episode). It does not depend on the
worker, attempt, execution order or time, so recomputing a shard draws the same values.
"""

import hashlib
import struct
from typing import Literal

import numpy as np

Stream = Literal[
    "initialize", "tasks", "resets", "actions", "beliefs", "context", "minibatches", "updates", "model", "baseline",
    "evaluation", "search", "witness",
]  # fmt: skip


OWN = "own:"  # prefix of plug-ins' stream names. No built-in stream uses it.


def seed_for(run_seed: int, stream: Stream, *position: int) -> int:
    """Return the 64-bit seed of a stream at a position: iteration, inner step, task and episode, where applicable.

    Different streams are independent. A run's seed is from 0 to 2**63 - 1.
    """
    return int.from_bytes(_digest(run_seed, stream, position)[:8], "little")


def generator(run_seed: int, stream: Stream, *position: int) -> np.random.Generator:
    """Return a counter-based (Philox) generator for a stream at a position of a run."""
    return _generator(_digest(run_seed, stream, position))


def own_generator(run_seed: int, name: str, *position: int) -> np.random.Generator:
    """Return a random generator for a plug-in's stream, which is distinct from every built-in stream.

    Args:
        run_seed: The run's seed.
        name: Stream name. Plug-ins in a run that use the same name and position draw the same values.
        position: Any indices that distinguish the draws, such as iteration, inner step and task.

    Raises:
        ValueError: the name is empty or contains unprintable characters.
    """
    if not name or not name.isprintable():
        raise ValueError(f"a stream name must consist of printable characters, got {name!r}")
    return _generator(_digest(run_seed, f"{OWN}{name}", position))


def _generator(digest: bytes) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, np.uint64)))


def _digest(run_seed: int, stream: str, position: tuple[int, ...]) -> bytes:
    numbers = struct.pack(f"<{1 + len(position)}q", run_seed, *position)
    return hashlib.blake2b(stream.encode() + b"\0" + numbers, digest_size=16).digest()
