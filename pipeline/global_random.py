"""Detection of draws from global random number generators, which stages must not use.

Workers import this module, so it does not import torch.
"""

import ctypes
import logging
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from metaloom.pipeline.plugins import is_installed

T = TypeVar("T")

log: logging.Logger = logging.getLogger(__name__)

_LIBRARIES = ("random", "numpy", "torch", "metaloom")
_RANDOM = cast(Any, random.random).__self__
_MOST_FRUITLESS = 3
SEEDED = "metaloom.pipeline.seeding.own_generator(run_seed, NAME, *position)"
"""Advice for messages: the generator that plug-ins must draw from."""
_CURE = f"{SEEDED}, or in a policy's sample from torch's own generator, which is seeded for it"
_CURE_OF_TORCH = (
    ". Build a module whose parameters are set later with torch.nn.utils.skip_init(torch.nn.Linear, ...), or under "
    "`with torch.random.fork_rng():`"
)


class Draw(NamedTuple):
    """A draw from a global generator."""

    generator: str  # name of its module
    where: str  # function and line
    in_env: bool  # made by an environment, not by an actor or learner
    installed: bool  # made by code of an installed package

    def __str__(self) -> str:
        cure = "self.np_random, which reset(seed=...) seeds" if self.in_env else _CURE
        return (
            f"{self.where} drew from the global generator of {self.generator}, whose state is shared with all other "
            f"code; draw from {cure}{_CURE_OF_TORCH if self.generator == 'torch' else ''}"
        )


class GlobalRandomWatch:
    """Detector of draws from global generators, which locates the code that makes them.

    It compares the generators' states before and after some work. If they differ, it repeats the work under a profiler
    to find the line, since another thread may have made the draw.
    """

    def __init__(self, *, on: bool = True) -> None:
        self._on = on
        self._fruitless = Counter[tuple[str, str]]()

    def stop(self) -> None:
        """Stop watching."""
        self._on = False

    def draw_of(
        self, work: Callable[[], T], stage: str, again: Callable[[], object] | None = None
    ) -> tuple[T, Draw | None]:
        """Run `work`; return its result, and the draw that it made from a global generator, or None if it made none.

        If a generator changed, the work (or `again`) is repeated on this thread only. If no draw is found then, a
        warning is logged, once per generator and stage, and again when the watch gives up.
        """
        if not self._on:
            return work(), None
        before = _states()
        result = work()
        after = _states()
        changed = [name for name in after if after[name] != before.get(name, after[name])]
        # Other threads draw from some generators all the time.
        changed = [name for name in changed if self._fruitless[stage, name] < _MOST_FRUITLESS]
        if not changed:
            return result, None
        draw, problem = _repeated_draw(again or work, changed)
        for name in changed if draw is None else ():
            self._fruitless[stage, name] += 1
            self._warn(name, stage, problem)
        return result, draw

    def _warn(self, generator: str, stage: str, problem: Exception | None) -> None:
        times = self._fruitless[stage, generator]
        if times == 1:
            raised = f" (which raised {type(problem).__name__}: {problem})" if problem else ""
            log.warning(
                f"the global generator of {generator} changed during {stage}, but when the work was repeated{raised}, "
                "no function drew from it. Either a value was drawn once and cached, so a replay in another process "
                "may differ, or another thread draws from it"
            )
        elif times == _MOST_FRUITLESS:
            what = f"the global generator of {generator} changed {times} times in this way"
            log.warning(f"{what}; it is no longer watched during {stage}")


def _states(*, exact: bool = False) -> dict[str, object]:
    found: dict[str, object] = {"random": random.getstate(), "numpy.random": _numpy_state(exact=exact)}
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = torch.get_rng_state().numpy().tobytes()
        if torch.cuda.is_initialized():
            found["torch.cuda"] = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    return found


def _numpy_state(*, exact: bool) -> object:
    of_numpy = cast(Any, np.random).get_bit_generator()
    if not isinstance(of_numpy, np.random.MT19937):
        return str(of_numpy.state)
    if exact:  # includes the cached second normal value
        _, keys, *others = cast(Any, np.random.get_state())  # noqa: NPY002
        return keys.tobytes(), *others
    # Read keys and position from memory: get_state() takes fifty times as long.
    return ctypes.string_at(of_numpy.ctypes.state_address, 625 * 4)


def _repeated_draw(
    work: Callable[[], object], generators: Sequence[str]
) -> tuple[Draw, None] | tuple[None, Exception | None]:
    """Run the work again; return its draw if it is the same both times, or None and any error that it raised."""
    began = time.perf_counter()
    draw, problem = _first_draw(work, generators)
    if draw is None:
        return None, problem
    if draw.generator == "random":  # only this thread's calls are traced
        return draw, None
    again, problem = _first_draw(work, generators)
    before = _states(exact=True)[draw.generator]
    time.sleep(min(max(time.perf_counter() - began, 0.02), 1.0))
    # A thread that draws constantly may show up at the same line twice, but it also draws while this thread is idle.
    alone = _states(exact=True)[draw.generator] == before
    return (draw, None) if again == draw and alone else (None, problem)


def _first_draw(work: Callable[[], object], generators: Sequence[str]) -> tuple[Draw | None, Exception | None]:
    problem = None
    found: list[Draw] = []
    others = [name for name in generators if name != "random"]
    before = _states(exact=True)

    def look(frame: FrameType, event: str, argument: object) -> None:
        # Library threads draw delays from `random`, so watch only this thread's calls. Reading the state, as a nested
        # watch does, is not a draw.
        if "random" in generators and event == "c_call" and getattr(argument, "__self__", None) is _RANDOM:
            generator = "random" if getattr(argument, "__name__", "") != "getstate" else None
        elif others and (now := _states(exact=True)) != before:
            generator = next((name for name in others if now[name] != before[name]), None)
        else:
            return
        if generator and not found:
            found.append(_draw(generator, frame.f_back if event == "call" and frame.f_back else frame))
            sys.setprofile(profiler)

    profiler = sys.getprofile()
    sys.setprofile(look)
    try:
        work()
    except Exception as error:  # the first execution succeeded; the draw may have been found already
        problem = error
    finally:
        sys.setprofile(profiler)
    return (found[0] if found else None), problem


def _draw(generator: str, frame: FrameType) -> Draw:
    """Return a Draw whose origin is the innermost function outside libraries and Metaloom."""
    stack = [f for f, _ in traceback.walk_stack(frame)]
    others = (f for f in stack if _module(f).partition(".")[0] not in _LIBRARIES)
    who = next(others, frame)
    in_env = any(_module(f) == "metaloom.pipeline.envs.loop_batch" for f in stack)
    where = f"{_module(who)}:{who.f_code.co_qualname}, line {who.f_lineno}"
    return Draw(generator, where, in_env, is_installed(who.f_code.co_filename))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
