"""JSON documents in which any changed byte shows.

A document is written in one canonical form (sorted keys, fixed separators) and carries the SHA-256 of that form
without the hash itself. A flipped byte then fails to parse, is not canonical, or contradicts the hash.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from metaloom.storage.errors import damaged
from metaloom.storage.format.files import read_file

Document = dict[str, Any]

_HASH = "sha256"
_LARGEST = 16 * 2**20  # parsed, JSON can take fifty times as much memory


def render(document: Mapping[str, Any], *, indented: bool = False) -> bytes:
    """Write a document as its canonical bytes.

    Raises:
        ValueError: it holds a NaN or an infinity.
        TypeError: it holds something that JSON does not know.
    """
    return (_indented(document, "\n") if indented else _compact(document)).encode() + b"\n"


def _compact(value: object, separators: tuple[str, str] = (",", ":")) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=separators)


def _indented(value: Any, end: str) -> str:
    """Do as `json.dumps` with indent=1, which is Python code: C writes all that holds no further list or object."""
    if not isinstance(value, dict | list | tuple) or not value:
        return _compact(value)
    inner, items = end + " ", value.values() if isinstance(value, dict) else value
    if not any(isinstance(item, dict | list | tuple) for item in items):
        text = _compact(value, ("," + inner, ": "))
        return f"{text[0]}{inner}{text[1:-1]}{end}{text[-1]}"
    if isinstance(value, dict):
        parts = (f"{_compact({key: 0})[1:-3]}: {_indented(value[key], inner)}" for key in sorted(value))
        return f"{{{inner}{f',{inner}'.join(parts)}{end}}}"
    return f"[{inner}{f',{inner}'.join(_indented(item, inner) for item in value)}{end}]"


def sealed(document: Mapping[str, Any], *, holder: str | None = None) -> Document:
    """Copy a document so that it carries its own hash, at the top or in the mapping `holder` inside it."""
    copy: Document = dict(document)
    target = copy
    if holder is not None:
        target = copy[holder] = dict(copy[holder])
    target.pop(_HASH, None)
    target[_HASH] = hashlib.sha256(render(copy)).hexdigest()
    return copy


def read_sealed(path: Path, *, indented: bool = False, holder: str | None = None) -> Document:
    """Read the document in a file, after checking that every byte is as it was written.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedRun: the file is not what was written.
    """
    raw = read_file(path, limit=_LARGEST)
    try:
        return parse_sealed(raw, indented=indented, holder=holder)
    except ValueError as error:
        raise damaged(path, str(error)) from None


def parse_sealed(raw: bytes, *, indented: bool = False, holder: str | None = None) -> Document:
    """Parse the document that bytes stand for, after checking that every byte is as it was written."""
    try:
        document: Any = json.loads(raw, parse_constant=_refuse_constant)
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


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
