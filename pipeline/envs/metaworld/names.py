"""Names of Meta-World's task classes and benchmarks, as plain data that does not require the package."""

from collections.abc import Mapping
from typing import NamedTuple


class Split(NamedTuple):
    """Training and test classes of a benchmark, in the benchmark's order."""

    train: tuple[str, ...]
    test: tuple[str, ...] = ()


def _split(train: str, test: str = "") -> Split:
    return Split(tuple(train.split()), tuple(test.split()))


CLASSES = _split(
    """
    assembly basketball bin-picking box-close button-press-topdown button-press-topdown-wall button-press
    button-press-wall coffee-button coffee-pull coffee-push dial-turn disassemble door-close door-lock door-open
    door-unlock hand-insert drawer-close drawer-open faucet-open faucet-close hammer handle-press-side
    handle-press handle-pull-side handle-pull lever-pull pick-place-wall pick-out-of-hole pick-place plate-slide
    plate-slide-side plate-slide-back plate-slide-back-side peg-insert-side peg-unplug-side soccer stick-push
    stick-pull push push-wall push-back reach reach-wall shelf-place sweep-into sweep window-open window-close
    """
).train
"""Class names in the package's order, without the suffix -v3; a class's index is its number in a task."""

BENCHMARKS: Mapping[str, Split] = {
    "ml10": _split(
        "reach push pick-place door-open drawer-close button-press-topdown peg-insert-side window-open sweep "
        "basketball",
        "drawer-open door-close shelf-place sweep-into lever-pull",
    ),
    "ml45": _split(
        """
        assembly basketball button-press-topdown button-press-topdown-wall button-press button-press-wall
        coffee-button coffee-pull coffee-push dial-turn disassemble door-close door-open drawer-close drawer-open
        faucet-open faucet-close hammer handle-press-side handle-press handle-pull-side handle-pull lever-pull
        pick-place-wall pick-out-of-hole push-back pick-place plate-slide plate-slide-side plate-slide-back
        plate-slide-back-side peg-insert-side peg-unplug-side soccer stick-push stick-pull push-wall push reach-wall
        reach shelf-place sweep-into sweep window-open window-close
        """,
        "bin-picking box-close hand-insert door-lock door-unlock",
    ),
    "mt10": _split(
        "reach push pick-place door-open drawer-open drawer-close button-press-topdown peg-insert-side window-open "
        "window-close"
    ),
    "mt50": Split(CLASSES),
}
"""Benchmarks with several classes. ml1-CLASS has a single class and is not listed."""


def class_name(task: str) -> str:
    """Return the name of a task class's ML1 environment, such as ML1PickPlace."""
    return "ML1" + "".join(word.capitalize() for word in task.split("-"))


FAMILIES: Mapping[str, str] = {
    f"metaworld-{name}": f"metaloom.pipeline.envs.metaworld.families:{cls}"
    for name, cls in (
        *((f"ml1-{task}", class_name(task)) for task in sorted(CLASSES)),
        *((name, name.upper()) for name in BENCHMARKS),
    )
}
"""Meta-World environment classes as module:Class, keyed by environment name."""
