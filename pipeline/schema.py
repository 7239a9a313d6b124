"""The pydantic bases of everything a user can configure."""

import ast
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from textwrap import dedent
from typing import Any, ClassVar, Generic, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError, core_schema

from metaloom.pipeline.plugins import Plugins, a_or_an, load, path_of
from metaloom.pipeline.refusals import ConfigError as ConfigError
from metaloom.pipeline.refusals import suggestion as suggestion

S = TypeVar("S", bound=BaseModel)

LATER = "later"
REFUSAL = "refusal"
MOST_REPEATS = 1_000_000
"""Bound of settings that count passes over an iteration's data: with more passes, no iteration would end."""


def told(problem: ErrorDetails) -> str:
    """Describe what pydantic requires of a value, what it found, and the allowed value that resembles it."""
    found, context = problem["input"], problem.get("ctx", {})
    if problem["type"] == REFUSAL:
        return problem["msg"]
    shown = "" if isinstance(found, dict) else f"; found {found!r}"
    hint = suggestion(str(found), re.findall("'([^']*)'", context["expected"])) if "expected" in context else ""
    return f"{problem['msg']}{shown}{hint}"


def later(default: Any, *, before: Any = None, **about: Any) -> Any:
    """Declare a field that earlier versions did not have; its old meaning does not enter the digest of their runs.

    So a run that was stored before the field existed keeps the digest of its configuration.

    Args:
        default: Value in new runs.
        before: Value in earlier versions, where it differs from the default; returned by `Settings.before`.
        about: Keywords of pydantic.Field.
    """
    return Field(default=default, json_schema_extra={LATER: default if before is None else before}, **about)


class Settings(BaseModel):
    """Immutable settings that refuse unknown keys, NaN and infinities."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    short_for: ClassVar[str] = ""
    """Field that a bare string sets, if any."""

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Return the text below each field, read when it is asked for: that takes longer than to make the class."""
        found: dict[str, str] = {}
        for base in reversed(cls.__mro__[: cls.__mro__.index(Settings)]):
            try:
                (node,) = ast.parse(dedent(inspect.getsource(base))).body
            except (OSError, TypeError, SyntaxError):  # a class without a file, or with text that is not indented
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
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe fields by the text below them."""
        shown = handler.resolve_ref_schema(handler(schema))
        described = cls.descriptions()
        for name, field in shown["properties"].items():
            if name in described:
                field.setdefault("description", described[name])
        return shown

    @model_validator(mode="wrap")
    @classmethod
    def _suggest_keys(cls, value: Any, handler: ModelWrapValidatorHandler["Settings"]) -> "Settings":
        try:
            return handler({cls.short_for: value} if cls.short_for and isinstance(value, str) else value)
        except ValidationError as error:
            lines = [_with_suggestion(problem, cls.model_fields) for problem in error.errors(include_url=False)]
            raise ValidationError.from_exception_data(error.title, lines) from None

    def decisive(self) -> dict[str, JsonValue]:
        """Return the settings as JSON, without later fields that keep earlier versions' behaviour."""
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
        """Return earlier versions' values by later field, where they differ from today's default."""
        extras = {name: (about.json_schema_extra, about.default) for name, about in cls.model_fields.items()}
        return {
            name: extra[LATER]
            for name, (extra, default) in extras.items()
            if isinstance(extra, dict) and LATER in extra and extra[LATER] != default
        }


class PluginSettings(BaseModel):
    """Settings of a class that `name` selects: a built-in one, an entry point, or module:Class.

    A settings class inherits from Settings and from groups such as this one, and so lists its parts.
    """

    name: str = ""
    """Omit it in a custom class: it then is where the class is found."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Give a user's subclass of a built-in algorithm, whose name is fixed, a name that is not."""
        super().__init_subclass__(**options)
        own = inspect.get_annotations(cls)
        if "name" in own or cls.__module__.startswith("metaloom."):
            return
        inherited = next(base for base in cls.__mro__[1:] if issubclass(base, PluginSettings))
        if len(get_args(inherited.model_fields["name"].annotation)) == 1:
            cls.__annotations__["name"] = str
            cls.name = ""  # pydantic reads a field's default from here


def refusal(message: str) -> PydanticCustomError:
    """Return a problem whose whole text is the message."""
    return PydanticCustomError(REFUSAL, "{message}", {"message": message})


def _with_suggestion(problem: ErrorDetails, keys: Iterable[str]) -> InitErrorDetails:
    """Return a problem that pydantic found, an unknown key with the keys that resemble it."""
    context = problem.get("ctx", {})
    kind: str | PydanticCustomError = problem["type"]
    if kind == "extra_forbidden" and len(problem["loc"]) == 1:
        shown = "" if isinstance(problem["input"], dict) else f"; found {problem['input']!r}"
        hint = suggestion(str(problem["loc"][0]), keys) or "; see `metaloom recipes --schema` for the keys there are"
        kind = refusal(f"unknown key{shown}{hint}")
    elif kind == REFUSAL:
        kind = refusal(context["message"])
    return InitErrorDetails(type=kind, loc=problem["loc"], input=problem["input"], ctx=context)


@dataclass(frozen=True, eq=False)
class ByName(Generic[S]):
    """Marks a field whose value is settings of any class of a kind, selected by their `name`.

    A bare name selects the settings with their defaults.

    Attributes:
        plugins: Registry where names are looked up.
        base: Base class or group of the settings.
        default: The name where none is given.
    """

    plugins: Plugins
    base: type[S]
    default: str | None = None

    def validate(self, value: object) -> S:
        """Make settings of a name, of a mapping with a name, or of themselves.

        Raises:
            ValidationError: something in them is wrong.
            ConfigError: settings of a class that could not be found again by their name.
        """
        if isinstance(value, self.base):
            return self._findable(value)
        given = {"name": value} if isinstance(value, str) else value
        if not isinstance(given, Mapping) or not isinstance(name := given.get("name", self.default), str):
            raise ConfigError(f"required the name of {a_or_an(self.plugins.kind)}, or a mapping that has it as name")
        try:
            found = self.plugins.find(name, self.base)
            names = get_args(found.model_fields["name"].annotation)
            if names and name not in names:
                raise ConfigError(
                    f"found {name!r}, whose field name takes only {', '.join(map(repr, names))}; required a class "
                    + ("that leaves the field out" if len(names) == 1 else f"derived from {path_of(self.base)}")
                )
        except ConfigError as problem:
            line = InitErrorDetails(type=refusal(str(problem)), loc=("name",), input=name)
            raise ValidationError.from_exception_data(self.plugins.kind, [line]) from problem
        return found.model_validate(given)

    def _findable(self, value: S) -> S:
        """Return the settings under a name by which another process finds their class."""
        given = getattr(value, "name", "")
        name = given or path_of(type(value))
        found = self.plugins.find(name, self.base)
        if found is not type(value):
            raise ConfigError(
                f"found an object of {path_of(type(value))} whose name is {name!r}, which stands for {path_of(found)}; "
                "leave the field name out in your class"
            )
        return value if given else value.model_copy(update={"name": name})

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        """Accept any settings that derive from `base`, dumped with all fields of their class."""
        return core_schema.no_info_plain_validator_function(self.validate)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe one of the built-in settings."""
        found = (load(path) for path in self.plugins.builtin.values())
        builtin: dict[Any, None] = dict.fromkeys(cls for cls in found if issubclass(cls, self.base))
        return handler(core_schema.union_schema([TypeAdapter(cls).core_schema for cls in builtin]))
