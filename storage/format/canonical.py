"""JSON documents that detect any changed byte.

A document is written in one canonical form (sorted keys, fixed separators) and carries the SHA-256 of that form
without the hash itself. A flipped byte then fails to parse, is not canonical, or contradicts the hash.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from metaloom.storage.errors import damaged
from metaloom.storage.format.files import read_file

Document = dict[str, Any]

_HASH = "sha256"
_LARGEST = 16 * 2**20  # parsed, JSON can take fifty times as much memory


def render(document: Mapping[str, Any], *, indented: bool = False) -> bytes:
    """Write a document as its canonical bytes.

    Raises:
        ValueError: it contains NaN or an infinity.
        TypeError: it contains a value that JSON does not support.
    """
    layout: dict[str, Any] = {"indent": 1} if indented else {"separators": (",", ":")}
    return json.dumps(document, sort_keys=True, allow_nan=False, ensure_ascii=False, **layout).encode() + b"\n"


def sealed(document: Mapping[str, Any], *, holder: str | None = None) -> Document:
    """Return a copy of a document with its hash, at the top or in the mapping `holder`."""
    copy: Document = dict(document)
    target = copy
    if holder is not None:
        target = copy[holder] = dict(copy[holder])
    target.pop(_HASH, None)
    target[_HASH] = hashlib.sha256(render(copy)).hexdigest()
    return copy


def read_sealed(path: Path, *, indented: bool = False, holder: str | None = None) -> Document:
    """Read a document from a file after verifying its hash.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedRun: the file differs from what was written.
    """
    raw = read_file(path, limit=_LARGEST)
    try:
        return parse_sealed(raw, indented=indented, holder=holder)
    except ValueError as error:
        raise damaged(path, str(error)) from None


def parse_sealed(raw: bytes, *, indented: bool = False, holder: str | None = None) -> Document:
    """Parse a document after verifying its hash."""
    try:
        document: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({type(error).__name__})") from None
    if not isinstance(document, dict):
        raise ValueError(f"JSON holds a {type(document).__name__} at the top, not an object")
    document = cast(Document, document)
    try:
        canonical = render(document, indented=indented) == raw
        intact = canonical and sealed(document, holder=holder) == document
    except (ValueError, TypeError, KeyError, RecursionError):
        intact = False
    if not intact:
        raise ValueError("the content does not match its own checksum")
    return document
