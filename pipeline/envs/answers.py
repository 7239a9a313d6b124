"""Validation of all values that an environment returns. Functions raise EnvError if a value is invalid."""

import math
import re
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from metaloom.pipeline.envs.contract import EnvError, Fact, MetaEnv
from metaloom.pipeline.types import Array

LARGEST = float(np.finfo(np.float32).max)


class RowFault(EnvError):
    """Raised, also by custom batches, if one row's environment raises an error or returns an invalid result.

    `call` is the call that failed: "make", "set_task", "reset", "step" or "act" (the policy's action is not finite).
    """

    def __init__(self, message: str, row: int, call: str) -> None:
        super().__init__(message)
        self.row = row
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.row, self.call)


def observation_of(answer: Any, shape: tuple[int, ...]) -> Array:
    """Return an observation as a flat array [O], which may share memory with the environment."""
    values = np.asarray(answer)
    if values.dtype.kind not in "biuf" or values.shape != shape:
        raise EnvError(
            f"got an observation of dtype {values.dtype} and shape {values.shape}; expected numbers of shape "
            f"{shape}, as its observation_space declares"
        )
    return values.reshape(-1)


def as_integers(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return observations in the integer dtype of their space, which must be able to represent them."""
    if values.dtype == dtype:
        return values
    with np.errstate(invalid="ignore"):
        kept = values.astype(dtype)
    if not (kept == values).all():
        found = values[kept != values].ravel()[0]
        raise EnvError(
            f"got {found} in the observation; expected integers of type {dtype}, as its observation_space "
            "declares. To keep observations as float32: --set env.integer_observations=false"
        )
    return kept


def wrong_number(observations: Array) -> tuple[int, str] | None:
    """Return the row and a description of the first entry, of [n, O], that float32 cannot represent, or None."""
    # Comparisons with NaN are false.
    sound = np.abs(observations) <= LARGEST
    if sound.all():
        return None
    row, at = np.argwhere(~sound)[0].tolist()
    return row, f"got {observations[row, at]} at index {at} of the observation; expected {_FINITE}"


def number_of(answer: Any, name: str) -> float:
    """Return a number from an environment as a float, which must be finite in float32."""
    if type(answer) is float:  # the usual case; this check makes it twice as fast
        number = answer
    else:
        value = np.asarray(answer)
        if value.ndim or value.dtype.kind not in "biuf":
            raise EnvError(f"got {shown(answer)} as {name}; expected one number")
        number = float(value)
    if not abs(number) <= LARGEST:
        raise EnvError(f"got {number} as {name}; expected {_FINITE}")
    return number


def flag_of(answer: Any, name: str) -> bool:
    """Return a boolean from an environment. Other types are rejected, since text such as "False" is truthy."""
    if answer is True or answer is False:
        return answer
    value = np.asarray(answer)
    if value.ndim or value.dtype.kind != "b":
        raise EnvError(f"got {shown(answer)} as {name}; expected True or False")
    return bool(value)


def reward_terms_of(reward: float, info: Any) -> dict[str, float]:
    """Return the reward terms in `info`, which must sum to the reward, or the reward as the only term."""
    if not isinstance(info, Mapping):
        raise EnvError(f"got {shown(info)} as info; expected a dict")
    if "reward_terms" not in info:
        return {"reward": reward}
    if not isinstance(info["reward_terms"], Mapping):
        raise EnvError(f'got {shown(info["reward_terms"])} as info["reward_terms"]; expected a dict of numbers')
    terms = {str(name): number_of(term, f"reward term {name}") for name, term in info["reward_terms"].items()}
    total = sum(terms.values())
    if not abs(total - reward) <= 1e-6 + 1e-6 * abs(reward):
        raise EnvError(
            f'info["reward_terms"] sums to {total}, but the reward is {reward}; the terms must sum to the reward'
        )
    return terms


def is_ctrl_c(error: BaseException) -> bool:
    """Return True for Ctrl-C. A KeyboardInterrupt outside the main thread was raised by an environment."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def last_line(error: BaseException) -> str:
    """Return an error's type and message in at most 500 characters, without its traceback."""
    # str(error) may be third-party code too, and may fail.
    text = traceback.format_exception_only(error)[-1].strip()
    return text if len(text) <= 500 else f"{text[:497]}..."


def own_traceback(error: BaseException | None) -> str:
    """Return the traceback of an error that an environment raised; "" if only its result was rejected."""
    if error is None or isinstance(error, EnvError):
        return ""
    text = "".join(traceback.format_exception(error))
    return text if len(text) <= _LONGEST_TRACEBACK else f"...\n{text[-_LONGEST_TRACEBACK:]}"


_LONGEST_TRACEBACK = 6000
_FINITE = "a finite number within float32"


def shown(value: Any) -> str:
    """Format a value from third-party code with its type, in at most 80 characters."""
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 80 else f"{text[:77]}..."


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")
# The metric of a number is average_NAME, and these names are already in use.
_TAKEN = ("return", "discounted_return", "length")


def declared_facts(env: gymnasium.Env[Any, Any]) -> tuple[Fact, ...]:
    """Return the facts declared by the outermost wrapper with a declaration, or else by the environment."""
    declared = env.get_wrapper_attr("facts") if env.has_wrapper_attr("facts") else ()
    is_declaration = isinstance(declared, list | tuple) and all(isinstance(f, tuple) and len(f) > 1 for f in declared)
    if not (isinstance(env.unwrapped, MetaEnv) or is_declaration):
        return ()  # an unrelated attribute with this name
    where = f"{type(env.unwrapped).__name__}.facts"
    try:
        facts = tuple(Fact(*fact) for fact in declared)
    except TypeError as problem:
        raise EnvError(f"{where}: got {shown(declared)}; expected a sequence of Fact: {problem}") from None
    names = [fact.name for fact in facts]
    for fact in facts:
        if not _NAME.fullmatch(str(fact.name)) or names.count(fact.name) > 1:
            raise EnvError(
                f"{where}: invalid name {fact.name!r}; names must be unique and consist of letters, digits and '_', "
                "starting with a letter"
            )
        if fact.kind not in ("flag", "number") or fact.per not in ("step", "episode"):
            raise EnvError(f'{where}: got {fact}; expected kind "flag" or "number", and per "step" or "episode"')
        if fact.kind == "flag" and fact.optional:
            raise EnvError(
                f"{where}: the flag {fact.name} is optional, but a flag cannot be NaN; declare it as a number"
            )
        if fact.kind == "number" and fact.name in _TAKEN:
            raise EnvError(
                f"{where} has the number {fact.name}, but every run already has the metric average_{fact.name}; "
                "choose another name"
            )
    return facts


def described_facts(env: gymnasium.Env[Any, Any]) -> dict[str, dict[str, Any]]:
    """Return the declared facts as JSON data, keyed by name."""
    about = [fact._asdict() for fact in declared_facts(env)]
    return {fact.pop("name"): fact for fact in about}


def facts_in(info: Mapping[str, Any], declared: Sequence[Fact]) -> dict[str, float]:
    """Return the facts that a single environment reports in `info`, with flags as 0 and 1."""
    reported = info.get("facts", {})
    if not declared and reported == {}:
        return {}
    if not isinstance(reported, Mapping):
        raise EnvError(f'got {shown(reported)} as info["facts"]; expected a dict of numbers and flags')
    _require_names('info["facts"]', reported, declared)
    return {fact.name: _value(reported[fact.name], fact) for fact in declared}


def check_facts(reported: Mapping[str, Array], declared: Sequence[Fact], rows: Array) -> None:
    """Raise EnvError unless a batched environment reports valid facts for the rows [n] that it stepped.

    Raises RowFault, a subclass, if a number that is not optional is not finite.
    """
    _require_names("step: facts", reported, declared)
    for fact in declared:
        values, kinds = reported[fact.name], "b" if fact.kind == "flag" else "iuf"
        if values.shape != (len(rows),) or values.dtype.kind not in kinds:
            raise EnvError(
                f"step: fact {fact.name}: got dtype {values.dtype} and shape {values.shape}; expected "
                f"{'bool' if fact.kind == 'flag' else 'numbers'} of shape ({len(rows)},)"
            )
        if fact.kind == "flag":
            continue
        sound = np.abs(values) <= LARGEST
        if fact.optional:
            sound |= np.isnan(values)
        if not sound.all():
            at = int(np.argmin(sound))
            raise RowFault(f"got {values[at]} as fact {fact.name}; expected {_wanted(fact)}", int(rows[at]), "step")


def _require_names(where: str, reported: Mapping[str, Any], declared: Sequence[Fact]) -> None:
    names = [fact.name for fact in declared]
    if sorted(map(str, reported)) != sorted(names):
        raise EnvError(
            f"{where}: got {sorted(map(str, reported))}; expected the facts that the environment declares, "
            f"{sorted(names)}, in every step"
        )


def _value(answer: Any, fact: Fact) -> float:
    value = np.asarray(answer)
    if fact.kind == "number":
        if value.ndim == 0 and value.dtype.kind == "f" and math.isnan(value):
            if fact.optional:
                return math.nan
            raise EnvError(f"got nan as fact {fact.name}; expected {_wanted(fact)}")
        return number_of(answer, f"fact {fact.name}")
    # Many environments report success as 0.0 and 1.0.
    if value.ndim or value.dtype.kind not in "biuf" or value not in (0, 1):
        raise EnvError(f"got {shown(answer)} as fact {fact.name}; expected True or False, or 1 or 0")
    return float(value)


def _wanted(fact: Fact) -> str:
    return _FINITE + (", or NaN" if fact.optional else "; only an optional fact may be NaN")
