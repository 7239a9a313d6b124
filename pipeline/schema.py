"""Pydantic base classes for settings."""

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from textwrap import dedent
from typing import Any, ClassVar, Generic, TypeVar, get_args

import pydantic
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError, core_schema

from metaloom.pipeline.plugins import Plugins, a_or_an, load, path_of
from metaloom.pipeline.shown import ConfigError as ConfigError
from metaloom.pipeline.shown import suggestion as suggestion

S = TypeVar("S", bound=BaseModel)

LATER = "later"
REFUSAL = "refusal"
MOST_REPEATS = 1_000_000  # upper bound for settings that count passes over an iteration's data


def describe(problem: ErrorDetails) -> str:
    """Return a message about a problem found by pydantic: the requirement, the value found, and a similar value."""
    found, context = problem["input"], problem.get("ctx", {})
    if problem["type"] == REFUSAL:
        return problem["msg"]
    shown = "" if isinstance(found, dict) else f"; got {found!r}"
    hint = suggestion(str(found), re.findall("'([^']*)'", context["expected"])) if "expected" in context else ""
    return f"{problem['msg']}{shown}{hint}"


def later(default: Any, *, before: Any = None, **about: Any) -> Any:
    """Declare a field that earlier versions did not have, without changing the digests of their runs.

    Digests omit the value that gives the old behavior: `before`, or the default if `before` is None; see
    `Settings.before`. Other keyword arguments are passed to pydantic.Field.
    """
    return Field(default=default, json_schema_extra={LATER: default if before is None else before}, **about)


class Settings(BaseModel):
    """Immutable settings that reject unknown keys, NaN and infinities."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    short_for: ClassVar[str] = ""
    """Name of the field that a bare string sets; "" if none."""

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Return the docstrings of fields by name. They are parsed from the source on demand, since parsing is slow."""
        found: dict[str, str] = {}
        for base in reversed(cls.__mro__[: cls.__mro__.index(Settings)]):
            try:
                (node,) = ast.parse(dedent(inspect.getsource(base))).body
            except (OSError, TypeError, SyntaxError):  # the class has no source file, or its source cannot be dedented
                continue
            for field, text in pairwise([*getattr(node, "body", ()), None]):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(described))):
                        found[name] = inspect.cleandoc(described)
                    case ast.AnnAssign(target=ast.Name(id=name)), _:
                        found.pop(name, None)
                    case _:
                        pass
        return found

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: pydantic.GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Add the fields' docstrings as descriptions."""
        shown = handler.resolve_ref_schema(handler(schema))
        described = cls.descriptions()
        for name, field in shown["properties"].items():
            if name in described:
                field.setdefault("description", described[name])
        return shown

    @model_validator(mode="wrap")
    @classmethod
    def _suggest_keys(cls, value: Any, handler: pydantic.ModelWrapValidatorHandler["Settings"]) -> "Settings":
        try:
            return handler({cls.short_for: value} if cls.short_for and isinstance(value, str) else value)
        except ValidationError as error:
            lines = [_with_suggestion(problem, cls) for problem in error.errors(include_url=False)]
            raise ValidationError.from_exception_data(error.title, lines) from None

    def decisive(self) -> dict[str, JsonValue]:
        """Return the settings as JSON data, without `later` fields whose value gives the old behavior."""
        dumped: dict[str, JsonValue] = self.model_dump(mode="json")
        for name, about in type(self).model_fields.items():
            value, extra = getattr(self, name), about.json_schema_extra
            if isinstance(extra, dict) and LATER in extra and value == extra[LATER]:
                del dumped[name]
            elif isinstance(value, Settings):
                dumped[name] = value.decisive()
        return dumped

    @classmethod
    def before(cls) -> dict[str, JsonValue]:
        """Return the values of `later` fields that restore the old behavior, where the defaults do not."""
        extras = {name: (about.json_schema_extra, about.default) for name, about in cls.model_fields.items()}
        return {
            name: extra[LATER]
            for name, (extra, default) in extras.items()
            if isinstance(extra, dict) and LATER in extra and extra[LATER] != default
        }


class PluginSettings(BaseModel):
    """Base class for settings selected by `name`: a built-in name, an entry point, or module:Class.

    Settings classes combine groups of fields such as this one by inheritance.
    """

    name: str = ""
    """Name that selects these settings. Omit this field in a custom class; it defaults to module:Class."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Let a custom subclass of built-in settings, whose name is fixed, have any name."""
        super().__init_subclass__(**options)
        own = inspect.get_annotations(cls)
        if "name" in own or cls.__module__.startswith("metaloom."):
            return
        inherited = next(base for base in cls.__mro__[1:] if issubclass(base, PluginSettings))
        if len(get_args(inherited.model_fields["name"].annotation)) == 1:
            cls.__annotations__["name"] = str
            cls.name = ""  # pydantic reads defaults from here


def refusal(message: str) -> PydanticCustomError:
    """Return a validation error with exactly this message."""
    return PydanticCustomError(REFUSAL, "{message}", {"message": message})


def _with_suggestion(problem: ErrorDetails, cls: type[BaseModel]) -> InitErrorDetails:
    """Return pydantic's error details, adding a similar key if the key is unknown."""
    context = problem.get("ctx", {})
    kind: str | PydanticCustomError = problem["type"]
    if kind == "extra_forbidden" and len(problem["loc"]) == 1:
        shown = "" if isinstance(problem["input"], dict) else f"; got {problem['input']!r}"
        page = "`metaloom recipes --schema`" if cls.__module__.startswith("metaloom.") else path_of(cls)
        hint = suggestion(str(problem["loc"][0]), cls.model_fields) or f"; see {page} for the valid keys"
        kind = refusal(f"unknown key{shown}{hint}")
    elif kind == REFUSAL:
        kind = refusal(context["message"])
    return InitErrorDetails(type=kind, loc=problem["loc"], input=problem["input"], ctx=context)


@dataclass(frozen=True, eq=False)
class ByName(Generic[S]):
    """Annotation for a field that holds the settings of any plug-in of one kind, selected by `name`.

    A bare string selects the plug-in with default settings; without a name, `default` is selected.
    """

    plugins: Plugins
    base: type[S]
    default: str | None = None

    def validate(self, value: object) -> S:
        """Build settings derived from `base`, given a name, a mapping that contains a name, or a settings object.

        Raises:
            ValidationError: the settings are invalid, or their class cannot be found by name.
            ConfigError: there is no name, or the object's name stands for another class.
        """
        if isinstance(value, self.base):
            return self._findable(value)
        given = {"name": value} if isinstance(value, str) else value
        if not isinstance(given, Mapping) or not isinstance(name := given.get("name", self.default), str):
            raise ConfigError(f"expected the name of {a_or_an(self.plugins.kind)}, or a mapping that contains a name")
        try:
            found = self.plugins.find(name, self.base)
            names = get_args(found.model_fields["name"].annotation)
            if names and name not in names:
                raise ConfigError(
                    f"{name!r} is a class whose `name` must be {' or '.join(map(repr, names))}; use a class "
                    + ("without the field `name`" if len(names) == 1 else f"derived from {path_of(self.base)}")
                )
        except ConfigError as problem:
            line = InitErrorDetails(type=refusal(str(problem)), loc=("name",), input=name)
            raise ValidationError.from_exception_data(self.plugins.kind, [line]) from problem
        return found.model_validate(given)

    def _findable(self, value: S) -> S:
        """Return the settings with a name that selects their class, or raise ConfigError if it selects another."""
        given = getattr(value, "name", "")
        name = given or path_of(type(value))
        found = self.plugins.find(name, self.base)
        if found is not type(value):
            raise ConfigError(
                f"the name of an object of {path_of(type(value))} is {name!r}, which stands for {path_of(found)}; "
                "remove the field name from your class"
            )
        return value if given else value.model_copy(update={"name": name})

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        """Accept any settings derived from `base`. Dumps include all fields of their class."""
        return core_schema.no_info_plain_validator_function(self.validate)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: pydantic.GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the JSON schema of any built-in settings class, or of an object that names a custom one."""
        found = (load(path) for path in self.plugins.builtin.values())
        builtin: dict[Any, None] = dict.fromkeys(cls for cls in found if issubclass(cls, self.base))
        shown = handler(core_schema.union_schema([TypeAdapter(cls).core_schema for cls in builtin]))
        installed = self.plugins.names()[len(self.plugins.builtin) :]
        names = [{"pattern": "^.+:.+$"}, *({"const": name} for name in installed)]
        custom = {"type": "object", "properties": {"name": {"anyOf": names}}, "required": ["name"]}
        return {"anyOf": [*shown.get("anyOf", [shown]), custom]}
