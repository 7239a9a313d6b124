"""Facts that environments tell of their steps: what they declare, and checked copies of what they then say."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from metaloom.pipeline.envs.contract import EnvError, Fact, MetaEnv
from metaloom.pipeline.envs.finite_checks import LARGEST, RowFault, number_of, shown
from metaloom.pipeline.types import Array

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}")
# A number's metric is average_NAME, and every run has these already.
_TAKEN = ("return", "discounted_return", "length")


def declared_facts(env: gymnasium.Env[Any, Any]) -> tuple[Fact, ...]:
    """Return what an environment, or the outermost wrapper that says so, declares; nothing where it does not.

    Raises:
        EnvError: a declaration has no such form, or a name occurs twice or is taken.
    """
    declared = env.get_wrapper_attr("facts") if env.has_wrapper_attr("facts") else ()
    is_declaration = isinstance(declared, list | tuple) and all(isinstance(f, tuple) and len(f) > 1 for f in declared)
    if not (isinstance(env.unwrapped, MetaEnv) or is_declaration):
        return ()  # an attribute of another meaning
    where = f"{type(env.unwrapped).__name__}.facts"
    try:
        facts = tuple(Fact(*fact) for fact in declared)
    except TypeError as problem:
        raise EnvError(f"{where}: found {shown(declared)}; required a sequence of Fact: {problem}") from None
    names = [fact.name for fact in facts]
    for fact in facts:
        if not _NAME.fullmatch(str(fact.name)) or names.count(fact.name) > 1:
            raise EnvError(
                f"{where}: found the name {fact.name!r}; required letters, digits and '_', a letter first, and every "
                "name once"
            )
        if fact.kind not in ("flag", "number") or fact.per not in ("step", "episode"):
            raise EnvError(f'{where}: found {fact}; required kind "flag" or "number", and per "step" or "episode"')
        if fact.kind == "flag" and fact.optional:
            raise EnvError(f"{where}: found the optional flag {fact.name}; required a number where NaN can be")
        if fact.kind == "number" and fact.name in _TAKEN:
            raise EnvError(
                f"{where}: found the number {fact.name}, whose metric average_{fact.name} every run has; required "
                "another name"
            )
    return facts


def described_facts(env: gymnasium.Env[Any, Any]) -> dict[str, dict[str, Any]]:
    """Return what `declared_facts` returns as plain JSON data, by name."""
    about = {fact.name: fact._asdict() for fact in declared_facts(env)}
    return {name: {key: value for key, value in fact.items() if key != "name"} for name, fact in about.items()}


def facts_in(info: Mapping[str, Any], declared: Sequence[Fact]) -> dict[str, float]:
    """Read the facts that a single environment tells in `info`, flags as 0 and 1.

    Raises:
        EnvError: one is missing, not declared, or no such number or flag.
    """
    told = info.get("facts", {})
    if not declared and told == {}:
        return {}
    if not isinstance(told, Mapping):
        raise EnvError(f'found {shown(told)} as info["facts"]; required a dict of numbers and flags')
    _require_names('info["facts"]', told, declared)
    return {fact.name: _value(told[fact.name], fact) for fact in declared}


def check_facts(told: Mapping[str, Array], declared: Sequence[Fact], rows: Array) -> None:
    """Check the facts that a batched environment tells of the `rows` [n] that it stepped.

    Raises:
        EnvError: one is missing or not declared, or is no array [n] of its kind.
        RowFault: a number is not finite, as only optional ones may be.
    """
    _require_names("step: facts", told, declared)
    for fact in declared:
        values, kinds = told[fact.name], "b" if fact.kind == "flag" else "iuf"
        if values.shape != (len(rows),) or values.dtype.kind not in kinds:
            raise EnvError(
                f"step: fact {fact.name}: found dtype {values.dtype} and shape {values.shape}; required "
                f"{'bool' if fact.kind == 'flag' else 'numbers'} of shape ({len(rows)},)"
            )
        if fact.kind == "flag":
            continue
        sound = np.abs(values) <= LARGEST
        if fact.optional:
            sound |= np.isnan(values)
        if not sound.all():
            at = int(np.argmin(sound))
            raise RowFault(f"found {values[at]} as fact {fact.name}; required {_wanted(fact)}", int(rows[at]), "step")


def _require_names(where: str, told: Mapping[str, Any], declared: Sequence[Fact]) -> None:
    names = [fact.name for fact in declared]
    if sorted(map(str, told)) != sorted(names):
        raise EnvError(
            f"{where}: found {sorted(map(str, told))}; required those that the environment declares, {sorted(names)}, "
            "in every step"
        )


def _value(answer: Any, fact: Fact) -> float:
    what = f"fact {fact.name}"
    if fact.kind == "number":
        value = np.asarray(answer)
        if value.ndim == 0 and value.dtype.kind == "f" and math.isnan(value):
            if fact.optional:
                return math.nan
            raise EnvError(f"found nan as {what}; required {_wanted(fact)}")
        return number_of(answer, what)
    # Many environments say success as 0.0 and 1.0.
    value = np.asarray(answer)
    if value.ndim or value.dtype.kind not in "biuf" or value not in (0, 1):
        raise EnvError(f"found {shown(answer)} as {what}; required True or False, or 1 or 0")
    return float(value)


def _wanted(fact: Fact) -> str:
    more = ", or NaN" if fact.optional else "; only a fact that is optional may be NaN"
    return f"a finite number within float32{more}"
