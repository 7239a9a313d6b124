"""The pydantic base of everything a user can configure."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

LATER = "later"


def later(default: Any, **about: Any) -> Any:
    """A field that earlier versions did not have. At its default it does not count in a run's digest.

    So a run that was stored before the field existed keeps the digest of its configuration.
    """
    return Field(default=default, json_schema_extra={LATER: True}, **about)


class Settings(BaseModel):
    """Immutable settings that refuse unknown keys, NaN and infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def decisive(self) -> dict[str, JsonValue]:
        """The settings as JSON, without later fields that have their defaults."""
        dumped: dict[str, JsonValue] = self.model_dump(mode="json")
        for name, about in type(self).model_fields.items():
            value, extra = getattr(self, name), about.json_schema_extra
            if isinstance(extra, dict) and LATER in extra and value == about.default:
                del dumped[name]
            elif isinstance(value, Settings):
                dumped[name] = value.decisive()
        return dumped
