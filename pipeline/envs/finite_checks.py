"""Checked copies of an environment's answers: nothing else of it enters a rollout."""

import threading
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np

from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.types import Array

LARGEST = float(np.finfo(np.float32).max)


class RowFault(EnvError):
    """The environment of one row failed, or gave what no rollout can go on from.

    A `BatchEnv` of your own may raise it to say which of its rows it was.

    Attributes:
        row: the row.
        call: what it was asked: "make", "set_task", "reset", "step" or "act" (no finite action to step with).
    """

    def __init__(self, message: str, row: int, call: str) -> None:
        super().__init__(message)
        self.row = row
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.row, self.call)


def observation_of(answer: Any, shape: tuple[int, ...]) -> Array:
    """An observation as an array [O], which may be the environment's own.

    Raises:
        EnvError: not numbers, or of another shape.
    """
    values = np.asarray(answer)
    if values.dtype.kind not in "biuf" or values.shape != shape:
        raise EnvError(
            f"found an observation of dtype {values.dtype} and shape {values.shape}; required numbers of shape "
            f"{shape}, as its observation_space says"
        )
    return values.reshape(-1)


def as_integers(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return observations in the integer type of their space.

    Raises:
        EnvError: one of them is no such integer.
    """
    if values.dtype == dtype:
        return values
    with np.errstate(invalid="ignore"):
        kept = values.astype(dtype)
    if not (kept == values).all():
        found = values[kept != values].ravel()[0]
        raise EnvError(
            f"found {found} in the observation; required integers of type {dtype}, as its observation_space says. To "
            "keep observations as float32: --set env.integer_observations=false"
        )
    return kept


def wrong_number(observations: Array) -> tuple[int, str] | None:
    """Find the first of several observations [n, O] float64 with a number that float32 cannot keep.

    Returns:
        Its row and the problem; None where there is none.
    """
    # NaN is not below anything.
    sound = np.abs(observations) <= LARGEST
    if sound.all():
        return None
    row, at = np.argwhere(~sound)[0].tolist()
    return row, f"found {observations[row, at]} at place {at} of the observation; required {_FINITE}"


def number_of(answer: Any, name: str) -> float:
    """A number as a float.

    Raises:
        EnvError: not one number, or too large for the float32 in which it is kept.
    """
    if type(answer) is float:  # most are: twice as fast
        number = answer
    else:
        value = np.asarray(answer)
        if value.ndim or value.dtype.kind not in "biuf":
            raise EnvError(f"found {shown(answer)} as {name}; required one number")
        number = float(value)
    if not abs(number) <= LARGEST:
        raise EnvError(f"found {number} as {name}; required {_FINITE}")
    return number


def flag_of(answer: Any, name: str) -> bool:
    """A truth value, which must be one: text such as "False" would count as true.

    Raises:
        EnvError: it is something else.
    """
    if answer is True or answer is False:
        return answer
    value = np.asarray(answer)
    if value.ndim or value.dtype.kind != "b":
        raise EnvError(f"found {shown(answer)} as {name}; required True or False")
    return bool(value)


def reward_terms_of(reward: float, info: Any) -> dict[str, float]:
    """The terms that `info` names, or the reward as the only one. Of what else it holds only facts are looked at.

    Raises:
        EnvError: they are not numbers, or do not sum to the reward.
    """
    if not isinstance(info, Mapping):
        raise EnvError(f"found {shown(info)} as info; required a dict")
    if "reward_terms" not in info:
        return {"reward": reward}
    if not isinstance(info["reward_terms"], Mapping):
        raise EnvError(f'found {shown(info["reward_terms"])} as info["reward_terms"]; required a dict of numbers')
    terms = {str(name): number_of(term, f"reward term {name}") for name, term in info["reward_terms"].items()}
    total = sum(terms.values())
    if not abs(total - reward) <= 1e-6 + 1e-6 * abs(reward):
        raise EnvError(
            f'info["reward_terms"] sums to {total}, the reward is {reward}; required that the terms sum to the reward'
        )
    return terms


def is_ctrl_c(error: BaseException) -> bool:
    """Tell if the user wants to stop: Python tells the main thread alone, so in others an environment has raised it."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def last_line(error: BaseException) -> str:
    """The kind of an error and its message, on a line or a few."""
    # str(error) is the environment's own code too, and may fail.
    text = traceback.format_exception_only(error)[-1].strip()
    return text if len(text) <= 500 else f"{text[:497]}..."


def own_traceback(error: BaseException | None) -> str:
    """The traceback of what an environment raised; empty when it answered and only the answer was refused."""
    if error is None or isinstance(error, EnvError):
        return ""
    text = "".join(traceback.format_exception(error))
    return text if len(text) <= _LONGEST_TRACEBACK else f"...\n{text[-_LONGEST_TRACEBACK:]}"


_LONGEST_TRACEBACK = 6000
_FINITE = "a finite number within float32"


def shown(value: Any) -> str:
    """A value of a user's code, with its type, in at most 80 characters."""
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 80 else f"{text[:77]}..."
