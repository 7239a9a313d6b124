"""YAML restricted to JSON values: numbers, strings, true, false, null, lists and mappings.

PyYAML follows YAML 1.1, in which 1e-3 is text, 010 is 8, 1:30 is 90, no is false and 2024-01-01 is a date. This module
follows the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema), without octal and hexadecimal
numbers.
"""

import json
import math
import re
from contextlib import suppress
from typing import Any, cast

import yaml
from pydantic import JsonValue


def parse(text: str) -> JsonValue:
    """Parse JSON or YAML text.

    Raises ValueError if the text is neither, contains a tag, a date, a duplicate key or a value that contains itself,
    or has too many values after its aliases are expanded.
    """
    with suppress(ValueError, RecursionError):
        return json.loads(text, object_pairs_hook=_mapping)
    try:
        # Round-trip through JSON, so that aliases do not share objects.
        return json.loads(json.dumps(_load(text)))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None


def dump(value: object) -> str:
    """Serialize a value to YAML that `parse` and other YAML readers read back as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_repeated([key for key, _ in pairs])
    return dict(pairs)


def _refuse_repeated(keys: list[str]) -> None:
    if len(set(keys)) < len(keys):
        repeated = max(keys, key=keys.count)
        raise ValueError(f"the key {repeated!r} appears twice in one mapping; keys must be unique")


_MOST_VALUES = 100_000
_TAG = "tag:yaml.org,2002:"
_KINDS = ("null", "bool", "int", "float", "str", "seq", "map")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 - the parent declares it so
    yaml_constructors = {  # noqa: RUF012
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in _KINDS  # the None entry rejects all other tags
    }


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes strings that YAML 1.1 or 1.2 would not read as strings, such as 1e3."""


_Loader.add_constructor(f"{_TAG}int", lambda loader, node: int(loader.construct_scalar(cast(Any, node))))
for _kind, _pattern, _first in (
    ("null", "~|null|Null|NULL|", "~nN"),
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", "[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("merge", "<<", "<"),
):
    # PyYAML tries a resolver only for values that begin with one of these characters; "" stands for the empty value.
    _starts = [*_first, ""] if _kind == "null" else [*_first]
    for _either in (_Loader, _Dumper):
        _either.add_implicit_resolver(_TAG + _kind, re.compile(rf"({_pattern})\Z"), _starts)


def _load(text: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        # Aliases of aliases can expand a small text beyond the available memory.
        if (count := _num_values(node, {})) > _MOST_VALUES:
            raise ValueError(f"its aliases expand to {count:.0f} values; at most {_MOST_VALUES} are accepted")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _num_values(node: yaml.Node, known: dict[int, float]) -> float:
    """Return the number of values in a node after its aliases are expanded; infinity if it contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        if isinstance(node, yaml.MappingNode):
            _refuse_repeated([key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        inside: list[Any] = node.value if isinstance(node, yaml.CollectionNode) else []
        children = [child for item in inside for child in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_num_values(child, known) for child in children)
    return known[id(node)]
