"""Outputs of custom stages: frozen dataclasses of arrays whose fields declare their axes.

A run stores the schema instead of the class, so reading an output does not require the user's code:

    @dataclass(frozen=True)
    class Noise:
        scale: Annotated[NDArray[np.float32], Axes("B E T", "scale of the noise of a step", unit="m")]
"""

import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from functools import cache
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

import numpy as np

from metaloom.pipeline.shown import Shown
from metaloom.pipeline.types import Array

DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
"""Array dtypes that a run can store."""

LETTERS = {
    "B": "task",
    "E": "episode",
    "T": "t",
    "T+1": "t_with_final",
    "O": "observation",
    "A": "action",
    "P": "task_field",
    "S": "state",
}
"""Axis names, keyed by their letter in `Axes.names`."""

REST = "..."  # placeholder for any further axes at the end

_AXIS = re.compile(r"[a-z][a-z0-9_]{0,63}")
_FIELD = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_TAKEN = ("iteration", "row", "step")  # reserved names, which neither fields nor axes may have
_EXAMPLE = 'Annotated[NDArray[np.float32], Axes("B E T", "what an entry is", unit="m")]'


class OutputError(TypeError):
    """Raised for a class or stored schema that is not valid as a stage's output."""


@dataclass(frozen=True)
class Axes:
    """Annotation that describes a custom output's field, as in `Annotated[NDArray[np.float32], Axes(...)]`.

    A field may also be a mapping from names to such arrays: `Annotated[Mapping[str, NDArray[np.float32]], Axes(...)]`.

    Attributes:
        names: Axes, separated by spaces: the letters B, E, T, T+1, O, A, P and S, or lower-case names. The name that
            the store uses for a letter, such as `t` for T, means the same axis. A final `...` allows any further axes.
        about: What an entry means.
        unit: Unit of the entries; "1" if dimensionless.
    """

    names: str
    about: str
    unit: str = "1"


@dataclass(frozen=True)
class OutputField:
    """A field of a custom output."""

    name: str
    axes: tuple[str, ...]  # axis names; the last may be `...`
    dtype: str
    unit: str
    description: str
    mapping: bool = False  # True for a mapping from names to such arrays

    @property
    def dims(self) -> tuple[str, ...]:
        """Axis names without a trailing `...`."""
        return self.axes[:-1] if self.axes[-1:] == (REST,) else self.axes

    def problems(self) -> Iterator[str]:
        """Yield the field's problems, each worded to follow the field's name in a message."""
        if not _FIELD.fullmatch(self.name) or keyword.iskeyword(self.name) or self.name in _TAKEN:
            yield f"is not a valid array name; use letters, digits and _, and none of {', '.join(_TAKEN)}"
        if self.dtype not in DTYPES:
            yield f"has entries of dtype {self.dtype}; expected one of {', '.join(DTYPES)}, as in NDArray[np.float32]"
        if not self.description.strip():
            yield f"does not describe its entries; add a few words, as in {_EXAMPLE}"
        for axis in self.dims:
            if not _AXIS.fullmatch(axis):
                yield (
                    f"has the axis {axis!r}; use letters of {' '.join(LETTERS)}, or new names in lowercase "
                    f"letters, with {REST} only at the end"
                )
            elif axis in _TAKEN:
                yield f"has the axis {axis!r}, which every output already has; choose another name"
        if len({*self.dims}) < len(self.dims):
            yield f"has an axis twice: {' '.join(self.dims)}; axes must have different names"
        elif "task" in self.dims[1:]:
            yield f"has the axes {' '.join(self.dims)}; task (B) must be the first, as in all batches"

    def problem_of(self, name: str, value: object, sizes: dict[str, int]) -> str | None:
        """Return a message that says why an array does not match the field, or None if it does.

        `name` is the array's name in the message. `sizes` contains the axis lengths of previous arrays, keyed by axis
        name; this array's lengths are added.
        """
        if not isinstance(value, np.ndarray):
            return f"{name} is {type(value).__name__}; expected an array of {self.dtype}"
        array, dims = cast(Array, value), self.dims
        if array.dtype != np.dtype(self.dtype):
            return f"{name} has dtype {array.dtype}; expected {self.dtype}"
        if array.ndim < len(dims) or (array.ndim > len(dims) and dims == self.axes):
            return f"{name} has shape {list(array.shape)}; expected the axes {', '.join(self.axes) or '(none)'}"
        for axis, size in zip(dims, array.shape, strict=False):
            if sizes.setdefault(axis, size) != size:
                return (
                    f"{name} has {size} entries along {axis}, but an earlier array has {sizes[axis]}; expected equal "
                    "lengths"
                )
        return None


@dataclass(frozen=True)
class OutputSchema:
    """Schema of a custom output; `description` is the first paragraph of its class's docstring, or ""."""

    name: str
    fields: tuple[OutputField, ...]
    description: str = ""

    @classmethod
    def of(cls, declared: object) -> "OutputSchema":
        """Derive the schema from a frozen dataclass, or raise OutputError if a field does not declare its axes."""
        if not (isinstance(declared, type) and is_dataclass(declared)):
            raise OutputError(f"{_name_of(declared)} is not a dataclass of arrays")
        if not cast(Any, declared).__dataclass_params__.frozen:
            raise OutputError(
                f"{_name_of(declared)} is mutable; use @dataclass(frozen=True), because other stages read it"
            )
        try:
            hints = get_type_hints(declared, include_extras=True)
        except Exception as problem:
            found = f"the annotations of {_name_of(declared)} raised {type(problem).__name__}: {problem}"
            raise OutputError(found) from problem
        # A dataclass without a docstring gets its signature as the docstring.
        about = declared.__doc__ or ""
        about = "" if about.startswith(f"{declared.__name__}(") else " ".join(about.split("\n\n")[0].split())
        found = [_field_of(declared, f.name, hints[f.name], init=f.init) for f in fields(declared)]
        return cls(declared.__name__, tuple(found), about).checked()

    @classmethod
    def parse(cls, name: str, document: Mapping[str, Any]) -> "OutputSchema":
        """Parse a schema from run.json, or raise OutputError if the document is not one."""
        try:
            found = _plain().validate_python({**document, "name": name})
        except (ValueError, TypeError):  # pydantic raises the former
            raise OutputError(f"not an output schema: {document!r:.200}") from None
        return found.checked()

    def checked(self) -> "OutputSchema":
        """Return the schema, or raise OutputError if outputs of this schema cannot be stored."""
        problems = [f"{self.name}.{f.name} {problem}" for f in self.fields for problem in f.problems()]
        if not _FIELD.fullmatch(self.name) or keyword.iskeyword(self.name):
            problems.append(f"{self.name!r} is not a valid name of an output; use letters, digits and _")
        if not self.fields:
            problems.append(f"{self.name} has no fields; declare at least one array")
        names = [f.name.casefold() for f in self.fields]
        if len({*names}) < len(names):
            problems.append(f"{self.name} has names that differ only in case; use names that differ otherwise too")
        axes = {axis for f in self.fields for axis in f.dims}
        problems += [
            f"{self.name}.{f.name} has the name of an axis; choose another name" for f in self.fields if f.name in axes
        ]
        if problems:
            raise OutputError("; ".join(problems))
        return self

    def document(self) -> dict[str, Any]:
        """Return the schema as JSON data, without its name."""
        return _plain().dump_python(self, mode="json", exclude={"name"})

    def differences(self, stored: "OutputSchema") -> list[str]:
        """Return messages about the differences from a stored schema in fields, axes, dtypes and units."""
        mine, other = ({f.name: _words(f) for f in schema.fields} for schema in (self, stored))
        return [
            f"{self.name}.{name} is {mine.get(name, 'absent')}, stored as {other.get(name, 'absent')}"
            for name in {**mine, **other}
            if mine.get(name) != other.get(name)
        ]

    def problem_of(self, value: object) -> str | None:
        """Return a message that says why an output does not match the schema, or None if it does."""
        sizes: dict[str, int] = {}
        for f in self.fields:
            if not hasattr(value, f.name):
                return f"{type(value).__name__} has no {f.name}; expected the fields of {self.name}"
            part = getattr(value, f.name)
            if f.mapping and not isinstance(part, Mapping):
                return f"{self.name}.{f.name} is {type(part).__name__}; expected a mapping from names to arrays"
            named = cast(Mapping[str, object], part) if f.mapping else {"": cast(object, part)}
            for name, array in named.items():
                if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                    return f"{self.name}.{f.name} has the key {name!r}; expected keys of type str"
                where = f"{self.name}.{f.name}" + (f"[{name!r}]" if f.mapping else "")
                if problem := f.problem_of(where, array, sizes):
                    return problem
        return None

    def record(self, values: Mapping[str, Any]) -> Any:
        """Build an output from its field values, as an instance of a generated class."""
        return _record_class(self)(**values)


@cache
def _plain() -> Any:
    """Return a pydantic adapter for schemas."""
    from pydantic import TypeAdapter  # imported here: it takes 0.1 s, and only custom outputs need it

    return TypeAdapter(OutputSchema)


def as_declared(declared: type[Any], value: Any) -> Any:
    """Convert an output to its declared class, with mappings sorted by name.

    Storage does not preserve class and order, and results must not depend on whether an input was stored.
    """
    parts = {f.name: getattr(value, f.name) for f in fields(declared)}
    sort = {name: dict(sorted(part.items())) for name, part in parts.items() if isinstance(part, Mapping)}
    return declared(**parts | sort)


def _field_of(declared: type[Any], name: str, hint: object, *, init: bool) -> OutputField:
    where = f"{declared.__name__}.{name}"
    args = cast(Sequence[Any], get_args(hint) if get_origin(hint) is Annotated else ())
    axes = [found for found in args[1:] if isinstance(found, Axes)]
    if len(axes) != 1 or not init:
        raise OutputError(f"{where} does not declare its axes and dtype; use {_EXAMPLE}")
    inner, (about,) = cast(object, args[0]), axes
    mapping = isinstance(origin := get_origin(inner), type) and issubclass(origin, Mapping)
    if mapping:
        key, inner = cast(Sequence[Any], get_args(inner))
        if key is not str:
            raise OutputError(f"{where} has keys of type {_name_of(key)}; expected str")
    if get_origin(inner) is not np.ndarray:
        raise OutputError(f"{where} is {_name_of(inner)}; expected an array with its dtype, as in {_EXAMPLE}")
    _, kind = cast(tuple[Any, Any], get_args(inner))
    (entries,) = get_args(kind) or (Any,)
    dtype = _name_of(entries).removesuffix("_")  # numpy.bool_ has the dtype bool
    named = tuple(LETTERS.get(axis, axis) for axis in about.names.split())
    return OutputField(name, named, dtype, about.unit, about.about, mapping)


def _name_of(found: object) -> str:
    return getattr(found, "__qualname__", str(found))


def _words(found: OutputField) -> str:
    kind = "names -> " if found.mapping else ""
    return f"{kind}{found.dtype}[{', '.join(found.axes)}] in {found.unit}"


@cache
def _record_class(schema: OutputSchema) -> Callable[..., Any]:
    members: dict[str, Any] = {
        "__doc__": schema.description,
        "__module__": __name__,
        "__reduce__": lambda value: (schema.record, ({f.name: getattr(value, f.name) for f in schema.fields},)),
    }
    kinds = [(f.name, Mapping[str, Array] if f.mapping else Array) for f in schema.fields]
    return make_dataclass(schema.name, kinds, bases=(Shown,), frozen=True, repr=False, eq=False, namespace=members)
