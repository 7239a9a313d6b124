"""Values that cannot be are refused where they are made, and those at the limit are taken."""

from collections.abc import Callable, Sequence
from unittest.mock import Mock

import numpy as np
import pytest

from metaloom.pipeline import arithmetic, shown
from metaloom.pipeline.algorithms.maml.settings import ProMP
from metaloom.pipeline.comparison.scores import Scores
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.dataflow.outputs import SpanOutputs
from metaloom.pipeline.dataflow.refs import Span, StageRef
from metaloom.pipeline.envs.bandit import BernoulliBandit
from metaloom.pipeline.envs.point_corner import PointCorner
from metaloom.pipeline.replay.index import TaskIndex
from metaloom.pipeline.types import Minibatches, TaskBatch
from metaloom.stages.graphs.on_policy import ON_POLICY

CONFIG = build_config({"env": "point-corner", "algorithm": "promp"})
SPAN = SpanOutputs(Span(("adapt",), 1, 2), ON_POLICY, CONFIG, Mock())


def bandit(*chances: float) -> None:
    BernoulliBandit(arms=2).set_task(np.array(chances))


def index(*iterations: int, tasks: int = 1) -> None:
    buffers = TaskIndex()
    for iteration in iterations:
        buffers.append(iteration, range(tasks), np.ones((1, 2), np.int32), in_context=True)


def minibatches(*shape: int) -> Minibatches:
    return Minibatches(np.zeros(shape, np.int64), np.zeros(shape[:2], np.int64))


def tasks(names: Sequence[str], units: Sequence[str]) -> TaskBatch:
    return TaskBatch(np.zeros((1, len(names))), np.zeros(1, np.int64), tuple(names), tuple(units))


def noisy(num_tasks: int) -> None:
    build_config({"env": "point-corner", "num_tasks": num_tasks, "algorithm": ProMP(gradient_noise=True)})


@pytest.mark.parametrize(
    ("make", "required"),
    [
        (lambda: StageRef(0, "Adapt"), "required lowercase letters, digits and _"),
        (lambda: StageRef(-1, "adapt"), "iteration -1 and step 0; required 0 to 99999999"),
        (lambda: StageRef(10**8, "adapt"), "required 0 to 99999999"),
        (lambda: StageRef(0, "adapt", -1), "step -1; required"),
        (lambda: StageRef(0, "adapt", 10**4), "required .* 0 to 9999"),
        (lambda: Span((), 0, 1), "required one stage or more"),
        (lambda: Span(("adapt",), 2, 1), "iterations 2 to 1; required .* in order"),
        (lambda: Span(("adapt",), -1, 1), "iterations -1 to 1; required .* in order"),
        (lambda: SPAN.lengths(StageRef(3, "adapt")), "not among the outputs that were declared"),
        (lambda: bandit(0.5, 1.001), "1.001.; required probabilities"),
        (lambda: bandit(-0.001, 0.5), ".-0.001.*; required probabilities"),
        (lambda: PointCorner(success_radius=0.0), "is 0.0; required a length above 0"),
        (lambda: PointCorner(success_radius=np.inf), "is inf; required a length above 0"),
        (lambda: index(1, 0), "iteration 0 after iteration 1; required ascending order"),
        (lambda: index(0, tasks=2), r"for 2 tasks; required \[B, E\]"),
        (lambda: minibatches(2, 3), r"required \[U, K, N\]"),
        (lambda: tasks(["x", "y"], ["m"]), "one unit per name"),
        (lambda: Scores((np.ones(1),), ()), "found scores for 1 runs and strata for 0"),
        (lambda: noisy(1), "estimated from differences between tasks"),
        (lambda: override({"iterations": 3}, ["iterations.x=1"]), "iterations is a value, not a section"),
        (lambda: override({}, ["a=["]), "the value is not valid YAML"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_what_is_required(make: Callable[[], object], required: str) -> None:
    with pytest.raises(ValueError, match=required):
        make()


def test_what_is_at_the_limit_is_taken() -> None:
    assert (StageRef(10**8 - 1, "adapt", 10**4 - 1).step, StageRef(0, "a1_").step) == (9999, 0)
    assert StageRef(1, "adapt") in Span(("adapt",), 1, 1)
    bandit(0.0, 1.0)
    assert PointCorner(success_radius=1e-9).success_radius == 1e-9
    index(-1, 0, 0, 1)
    assert minibatches(1, 1, 1).rows.shape == (*tasks(["x"], ["m"]).params.shape, 1)
    noisy(2)
    assert override({}, ["a.b=1"]) == {"a": {"b": 1}}


def test_facts_of_machine_code_have_one_order_and_no_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = [
        {"user_api": api, "internal_api": api, "architecture": code}
        for api, code in (("blas", "Zen"), ("openmp", None), ("blas", "Haswell"), ("blas", "Zen"))
    ]
    monkeypatch.setattr(arithmetic, "threadpool_info", lambda: libraries)
    assert arithmetic.blas_facts() == ("blas Haswell", "blas Zen")
    monkeypatch.setattr(arithmetic, "blas_facts", lambda: ("zlib", "blas Zen"))
    monkeypatch.setattr(arithmetic, "numpy_facts", lambda: "AVX2")
    assert arithmetic.acting_facts() == ("blas Zen", "numpy AVX2", "zlib")
    assert arithmetic.lacking("torch", "AVX2", {"f16c"}) == "the processor lacks avx2 fma"
    assert arithmetic.lacking("torch", "AVX2", {"avx2", "fma"}) == ""


def test_text_is_cut_in_the_middle_and_only_beyond_its_most() -> None:
    most = shown._MOST_CHARACTERS
    assert shown.error_text(ValueError("x" * most)) == "x" * most
    text = "".join(f"{n:05d}" for n in range(most))
    first, more, last = shown.error_text(ValueError(text)).split(" ... ")
    assert more == f"({len(text) - most:,} more characters)"
    assert text.startswith(first)
    assert text.endswith(last)
    assert len(first) + len(last) == most
