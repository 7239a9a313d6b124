"""The pydantic base of everything a user can configure."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Immutable settings that refuse unknown keys, NaN and infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
