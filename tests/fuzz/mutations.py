"""Small changes of files: what a flipped bit, a cut, or someone who knows the format would make of them."""

import random
from collections.abc import Callable

_PIECES = (
    *(b"null", b"-1", b"1e999", b"99999999999999999999", b"[]", b"{}", b'""', b"\x00", b"\xff\xfe", b"NaN", b"0"),
    *(b"&a [*a, *a]", b"!!python/object:os.system", b"9" * 5000, b"[" * 2000, b"@", b":", b"..", b"\xed\xa0\x80"),
)


def mutated(raw: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Return bytes with a few changes, or joined with those of another file."""
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        raw = rng.choice(_CHANGES)(raw, rng, others)
    return raw[: 2**16]


def _flip(raw: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    del others
    if not raw:
        return raw
    at = rng.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]


def _insert(raw: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    del others
    at, skip = rng.randrange(len(raw) + 1), rng.choice((0, 1, 4, 8))
    return raw[:at] + rng.choice(_PIECES) + raw[at + skip :]


def _cut(raw: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    del others
    at = rng.randrange(len(raw) + 1)
    return raw[:at] + raw[at + rng.randrange(len(raw) - at + 1) :]


def _splice(raw: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    other = rng.choice(others)
    return raw[: rng.randrange(len(raw) + 1)] + other[rng.randrange(len(other) + 1) :]


def _word(raw: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """Replace a number or a word of a text by a piece."""
    del others
    words = raw.split(b" ") if rng.random() < 0.3 else raw.split(b",")
    at = rng.randrange(len(words))
    key, colon, _ = words[at].rpartition(b":")
    words[at] = key + colon + rng.choice(_PIECES)
    return (b" " if b" " in raw and len(words) > raw.count(b",") + 1 else b",").join(words)


_CHANGES: tuple[Callable[[bytes, random.Random, list[bytes]], bytes], ...] = (
    _flip,
    _insert,
    _cut,
    _splice,
    _word,
    _word,
)
