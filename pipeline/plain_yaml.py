"""YAML that means what JSON can say: numbers, text, true, false, null, lists and mappings, and nothing else.

PyYAML follows YAML 1.1, in which 1e-3 is text, 010 is 8, 1:30 is 90, no is false and 2024-01-01 is a date. Here the
core schema of YAML 1.2 decides (https://yaml.org/spec/1.2.2/#103-core-schema), without its octal and hexadecimal.
"""

import json
import re
from typing import Any

import yaml
from pydantic import JsonValue


def parse(text: str) -> JsonValue:
    """The value that a JSON or YAML text describes.

    Raises:
        ValueError: it is neither, or holds a tag, a date, or itself.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        # Through JSON, so that what two aliases share becomes two values.
        return json.loads(json.dumps(yaml.load(text, _Loader)))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None


_TAG = "tag:yaml.org,2002:"
_KINDS = ("null", "bool", "int", "float", "str", "seq", "map")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 - the parent declares it so
    yaml_constructors = {  # noqa: RUF012
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in _KINDS  # None refuses all others
    }


def _construct_int(loader: _Loader, node: Any) -> int:
    return int(loader.construct_scalar(node))


_Loader.add_constructor(f"{_TAG}int", _construct_int)
for _kind, _pattern, _first in (
    ("null", "~|null|Null|NULL|", "~nN"),
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("merge", "<<", "<"),
):
    # PyYAML tries a kind for values that begin with one of these characters; "" stands for an empty value.
    _starts = [*_first, ""] if _kind == "null" else [*_first]
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"({_pattern})\Z"), _starts)
