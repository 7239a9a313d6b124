"""Graphs made from others, and what is refused while they are made: each refusal names stage, edge and cure."""

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.dataflow.edges import (
    every_step,
    last_iteration,
    last_iterations,
    last_step,
    since_start,
    steps_so_far,
    this_step,
)
from metaloom.pipeline.dataflow.outputs import SpanOutputs
from metaloom.pipeline.dataflow.refs import Span, StageRef
from metaloom.pipeline.dataflow.stage import EACH_STEP, INNER_STEP, ITERATION, At, GraphError, Stage, call
from metaloom.pipeline.outputs import Axes
from metaloom.pipeline.types import EpisodeBatch, Samples, TaskBatch, TaskParams
from metaloom.stages.adapt import ADAPT
from metaloom.stages.graphs.off_policy import OFF_POLICY
from metaloom.stages.graphs.on_policy import ON_POLICY
from metaloom.stages.process_samples import PROCESS_SAMPLES


def smooth(*, samples: Samples) -> Samples:
    return samples


SMOOTH = Stage(smooth, EACH_STEP)
CONFIG = build_config({"env": "point-corner", "algorithm": "promp"})


def names(graph):
    return [stage.name for stage in graph.stages]


def test_a_stage_is_declared_by_its_function():
    assert (SMOOTH.name, SMOOTH.output, SMOOTH.group) == ("smooth", Samples, "smooth_{step}")
    assert (SMOOTH.edges, SMOOTH.tools) == ({"samples": "samples"}, ())
    assert Stage(smooth, ITERATION).group == "smooth"
    assert (SMOOTH.samples, SMOOTH.thinnable, SMOOTH.ends_iteration) == (False, False, False)


def test_an_iteration_starts_with_the_learner_of_the_one_before_or_of_the_start():
    expected = [StageRef(0, "initialize"), StageRef(0, "meta_optimize"), StageRef(1, "meta_optimize")]
    assert [ON_POLICY.learner_ref(i) for i in range(3)] == expected


def test_an_inserted_stage_gives_every_edge_of_the_stage_that_it_stands_for():
    graph = ON_POLICY.insert(SMOOTH, after=PROCESS_SAMPLES, gives="samples")
    assert names(graph) == [*names(ON_POLICY)[:4], "smooth", *names(ON_POLICY)[4:]]
    assert graph.inputs(CONFIG, StageRef(2, "smooth", 1)) == {"samples": StageRef(2, "process_samples", 1)}
    assert graph.inputs(CONFIG, StageRef(2, "adapt"))["samples"] == StageRef(2, "smooth")
    assert graph.inputs(CONFIG, StageRef(2, "meta_optimize"))["samples"] == tuple(
        StageRef(2, "smooth", k) for k in (0, 1)
    )
    assert [stage.name for stage in graph.adapting] == ["process_samples", "smooth", "adapt"]
    twice = graph.insert(replace(SMOOTH, name="again", group="again_{step}"), after="smooth", gives="samples")
    assert twice.inputs(CONFIG, StageRef(2, "again", 1)) == {"samples": StageRef(2, "smooth", 1)}
    assert twice.inputs(CONFIG, StageRef(2, "adapt"))["samples"] == StageRef(2, "again")
    earlier = ON_POLICY.insert(ALONE, after="collect_rollouts", gives="rollouts")
    assert [stage.name for stage in earlier.adapting] == ["alone", "process_samples", "adapt"]


def test_a_stage_without_an_edge_of_its_own_changes_nothing_else():
    graph = ON_POLICY.insert(SMOOTH, after="process_samples")
    assert graph.edges == ON_POLICY.edges
    assert graph.inputs(CONFIG, StageRef(0, "adapt")) == ON_POLICY.inputs(CONFIG, StageRef(0, "adapt"))


def test_a_replaced_or_renamed_stage_takes_its_edges_along():
    def climb(*, params: TaskParams, samples: Samples) -> TaskParams:
        return params

    own = Stage(climb, INNER_STEP, reads={"params": "acting", "samples": "samples"})
    graph = ON_POLICY.replace(ADAPT, own)
    acting = graph.inputs(CONFIG, StageRef(0, "collect_rollouts", 1))["params"]
    assert acting == StageRef(0, "climb")
    renamed = graph.rename("climb", "ascend")
    assert str(renamed.edges["acting"]) == "last_step(ascend, first=learner)"
    assert renamed["ascend"].group == "climb_{step}"
    assert renamed.adaptation == (renamed["collect_rollouts"], renamed["ascend"])


def test_a_removed_stage_takes_the_edges_that_nobody_reads_along():
    graph = ON_POLICY.edge(acting=this_step("initialize")).remove(ADAPT)
    assert "adapt" not in names(graph)
    assert graph.adaptation is None
    assert "evaluate" not in names(ON_POLICY.remove("evaluate"))


@pytest.mark.parametrize(
    ("edge", "k", "expected"),
    [
        (this_step("process_samples"), 1, StageRef(3, "process_samples", 1)),
        (this_step("sample_tasks"), 1, StageRef(3, "sample_tasks")),
        (last_step("process_samples"), 1, StageRef(3, "process_samples", 0)),
        (last_step("process_samples", first="tasks"), 0, StageRef(3, "sample_tasks")),
        (every_step("adapt"), 0, (StageRef(3, "adapt", 0),)),
        (steps_so_far("process_samples"), 0, (StageRef(3, "process_samples", 0),)),
        (since_start("adapt", "sample_tasks"), 0, Span(("adapt", "sample_tasks"), 0, 3)),
        (last_iterations("adapt"), 0, Span(("adapt",), 3, 3)),
    ],
)
def test_every_word_names_outputs_relative_to_the_stage_that_reads(edge, k, expected):
    def look(*, seen: object) -> Samples: ...

    graph = ON_POLICY.edge(own=edge).insert(Stage(look, EACH_STEP, reads={"seen": "own"}), after="adapt")
    assert graph.inputs(CONFIG, StageRef(3, "look", k)) == {"seen": expected}


def test_the_episodes_that_are_played_again_are_drawn_in_each_iteration_and_run():
    def drawn(seed):
        config = build_config({"env": {"name": "point-corner", "witness": True}, "algorithm": "promp", "seed": seed})
        found = [ON_POLICY.inputs(config, StageRef(i, "meta_optimize")) for i in range(12)]
        assert [one["witness_tasks"] for one in found] == [StageRef(i, "sample_tasks") for i in range(12)]
        batches = [one["witness_episodes"] for one in found]
        assert [(batch.iteration, batch.stage) for batch in batches] == [(i, "collect_rollouts") for i in range(12)]
        return [batch.step for batch in batches]

    assert drawn(1) == [1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]  # in stored runs, too
    assert drawn(2) == [0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 0, 1]
    config = build_config({"env": {"name": "point-corner", "witness": True}, "algorithm": "promp"})
    for stage, change in (("collect_rollouts", {"group": "own_{step}"}), ("sample_tasks", {"output": Samples})):
        lacking = ON_POLICY.replace(stage, replace(ON_POLICY[stage], **change))
        assert {*lacking.inputs(config, StageRef(1, "meta_optimize"))} == {*ON_POLICY["meta_optimize"].inputs}


def scaled(scale, at, offset=0, *, samples: "Samples") -> Samples:
    return replace(samples, advantages=samples.advantages * np.float32(scale) + np.float32(offset + at.step))


def test_a_stage_may_be_a_function_with_some_of_its_arguments_filled_in():
    stage = Stage(partial(scaled, 2, offset=1), EACH_STEP)
    assert (stage.name, stage.output, stage.tools) == ("scaled", Samples, ("at",))
    assert (stage.edges, stage.annotations["samples"]) == ({"samples": "samples"}, Samples)
    ones = np.ones((1, 1, 1), np.float32)
    found = call(stage, {"at": At(0, 0, 3)}, {"samples": Samples(ones, ones, ones, ones)}, map)
    assert found.advantages.item() == 2 * 1 + 1 + 3


def loose(*everything) -> Samples: ...
def untyped(*, samples): ...
def unknown(*, samples: Samples) -> "Nothing": ...  # noqa: F821
def many(*, samples: Samples, sample: Samples) -> Samples: ...
def handed(contxt, *, samples: Samples) -> Samples: ...
def alone(*, episodes: EpisodeBatch) -> EpisodeBatch: ...


ALONE = Stage(alone, EACH_STEP, reads={"episodes": "rollouts"})
REFUSED = {
    "no annotation": (
        lambda: Stage(untyped, EACH_STEP),
        ":untyped is annotated to return None; give the type of its output, as in -> Samples",
    ),
    "no function": (lambda: Stage("smooth", EACH_STEP), "'smooth' is not a function, which a stage needs; use Stage("),
    "parameters": (
        lambda: Stage(loose, EACH_STEP),
        "has the parameter *everything; all parameters must be passed by name",
    ),
    "reads": (
        lambda: Stage(many, EACH_STEP, reads={"samples": "samples"}),
        "has the keyword-only parameters samples, sample; they must match (sample does not)",
    ),
    "tool": (
        lambda: ON_POLICY.insert(Stage(handed, EACH_STEP), after="adapt"),
        "stage handed: its function takes contxt, which is not a tool; use one of at, config, setup, learner",
    ),
    "edge": (
        lambda: ON_POLICY.insert(SMOOTH.reading(samples="sample"), after="adapt"),
        "stage smooth reads samples from the edge sample, which does not exist; use one of learner, tasks",
    ),
    "edge to nothing": (
        lambda: ON_POLICY.edge(own=this_step("adpat")),
        "the edge own is this_step(adpat), but there is no stage adpat; use one of initialize, sample_tasks, "
        "collect_rollouts, process_samples, adapt, meta_optimize, evaluate; did you mean adapt?",
    ),
    "first": (
        lambda: ON_POLICY.edge(acting=last_step("adapt", first="acting")),
        "the edge acting is last_step(adapt, first=acting); its first edge must be one of learner, tasks",
    ),
    "after": (
        lambda: ON_POLICY.insert(SMOOTH, after="process_sample"),
        "there is no stage process_sample; use one of initialize",
    ),
    "gives": (
        lambda: ON_POLICY.insert(SMOOTH, after="process_samples", gives="sample"),
        "insert gives='sample'; expected one of learner, tasks, acting, rollouts, samples",
    ),
    "another type": (
        lambda: ON_POLICY.insert(
            Stage(alone, EACH_STEP, reads={"episodes": "rollouts"}), after="adapt", gives="samples"
        ),
        "alone gives EpisodeBatch 'k = 0 ... K', but the edge samples comes from process_samples, which gives Samples",
    ),
    "fewer steps": (
        lambda: ON_POLICY.insert(replace(SMOOTH, per=INNER_STEP), after="process_samples", gives="samples"),
        "smooth gives Samples 'k = 0 ... K-1', but the edge samples comes from process_samples, which gives Samples "
        "'k = 0 ... K'; both must be the same",
    ),
    "removed": (
        lambda: ON_POLICY.remove("process_samples"),
        "adapt reads the edge samples = this_step(process_samples), which comes from process_samples; give the edge "
        "another source before removing process_samples: graph.edge(samples=...)",
    ),
    "one name": (
        lambda: ON_POLICY.rename("adapt", "evaluate"),
        "two stages have the name evaluate; rename one with graph.rename",
    ),
    "no stage": (lambda: ON_POLICY.insert(smooth, after="adapt"), "among its stages; expected Stage(function, per)"),
    "text": (
        lambda: ON_POLICY.edge(own="samples"),
        "graph on_policy: got 'samples' among its edges; expected an edge from a stage, such as this_step('adapt')",
    ),
    "edge from a function": (
        lambda: ON_POLICY.edge(own=this_step(smooth)),
        "an edge must come from a stage or the name of one, as in this_step('adapt'); got <function",
    ),
    "edge from nothing": (
        lambda: ON_POLICY.edge(own=since_start()),
        "since_start() needs at least one stage; name the",
    ),
    "first stage": (
        lambda: ON_POLICY.edge(learner=last_iteration("meta_optimize", first=SMOOTH)),
        "the edge learner is last_iteration(meta_optimize, first=this_step(smooth)), but there is no stage smooth",
    ),
    "over": (
        lambda: replace(SMOOTH, over="anything"),
        "stage smooth is over 'anything'; use over='tasks' or omit it",
    ),
    "per": (
        lambda: Stage(smooth, "each_step"),
        "stage smooth has per='each_step'; expected ONCE, ITERATION, INNER_STEP",
    ),
    "name": (
        lambda: Stage(lambda *, samples: samples, EACH_STEP, output=Samples),
        "has the name '<lambda>'; use",
    ),
    "output": (
        lambda: Stage(smooth, EACH_STEP, output="Samples"),
        "smooth: has output='Samples'; give the type of",
    ),
    "unknown output": (
        lambda: Stage(unknown, EACH_STEP),
        """NameError("name 'Nothing' is not defined"); give the""",
    ),
    "edge in reads": (
        lambda: Stage(smooth, EACH_STEP, reads={"samples": this_step("adapt")}),
        "map inputs to names of edges: {'state': 'learner'}",
    ),
    "shared object": (
        lambda: replace(ON_POLICY, shared={"memo": {}}),
        "memo = {}; it must be a function that makes the value",
    ),
    "shared tool": (
        lambda: replace(ON_POLICY, shared={"at": dict}),
        "shared has at, which is the name of a tool; choose another",
    ),
    "argument of shared": (
        lambda: replace(ON_POLICY, shared={"memo": lambda confg: {}}),
        "shared has memo, whose function takes confg; it can only take tools other than at",
    ),
    "two arguments of shared": (
        lambda: replace(ON_POLICY, shared={"memo": lambda config, size=3, *rest, at, **more: {}}),
        "shared has memo, whose function takes at; it can only take tools other than at",
    ),
    "another graph's stage": (
        lambda: OFF_POLICY.replace(ADAPT, SMOOTH),
        "graph off_policy: there is no stage adapt; use one of initialize, fill_memory",
    ),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_does_not_fit_is_refused_while_the_graph_is_made(mistake):
    make, sentence = REFUSED[mistake]
    with pytest.raises(GraphError, match=re.escape(sentence)):
        make()


@dataclass(frozen=True)
class Spread:
    """How far rewards spread."""

    scale: Annotated[NDArray[np.float32], Axes("B", "standard deviation")]
    ends: Annotated[Mapping[str, NDArray[np.float32]], Axes("B E", "last rewards")]


@dataclass(frozen=True)
class Total:
    """Mean over tasks."""

    mean: Annotated[NDArray[np.float32], Axes("", "mean")]


def alone_noise(at, *, params: TaskParams, tasks: TaskBatch, spread: Spread, state: object) -> TaskParams:
    assert len(tasks) == len(params.params["w"]) == len(spread.scale) == 1
    return TaskParams(
        {"w": params.params["w"] * np.float32(tasks.params[0, 0]) + spread.ends["last"] + np.float32(at.task)}
    )


@dataclass(frozen=True)
class Mixed:
    """Numbers of tasks and of all together."""

    scale: Annotated[NDArray[np.float32], Axes("B", "scale")]
    mean: Annotated[NDArray[np.float32], Axes("", "mean")]


def mixed(*, params: TaskParams) -> Mixed: ...


def spread_of(*, mixed: tuple[Mixed, ...]) -> Spread:
    assert all(len(one.scale) == 1 for one in mixed)
    ends = np.stack([one.scale + one.mean for one in mixed], axis=-1)
    return Spread(sum(one.scale for one in mixed), {"last": ends})


def together(*, params: TaskParams, tasks: TaskBatch) -> Total: ...


def test_a_stage_over_tasks_gets_each_task_alone_on_any_thread_and_its_outputs_are_joined():
    reads = dict.fromkeys(("params", "tasks", "spread", "state"), "learner")
    stage = Stage(alone_noise, EACH_STEP, over="tasks", reads=reads)
    params = TaskParams({"w": np.arange(6, dtype=np.float32).reshape(3, 2)})
    tasks = TaskBatch(np.float64([[1], [2], [3]]), np.zeros(3, np.int64), ("scale",), ("1",))
    spread = Spread(np.ones(3, np.float32), {"last": np.float32([[0, 1], [0, 1], [0, 1]])})
    given = {"params": params, "tasks": tasks, "spread": spread, "state": object()}
    expected = params.params["w"] * [[1], [2], [3]] + [[0, 1]] * 3 + [[0], [1], [2]]
    with ThreadPoolExecutor(2) as pool:
        for parallel in (map, pool.map, lambda work, items: reversed([*map(work, reversed(items))])):
            found = call(stage, {"at": At(0, 0)}, given, parallel)
            np.testing.assert_array_equal(found.params["w"], expected)
    with pytest.raises(GraphError, match=r"alone_noise is over tasks, but its inputs have \[2, 3\] tasks"):
        call(stage, {"at": At(0, 0)}, {**given, "params": params.slice(0, 2)}, map)


@pytest.mark.parametrize("tasks", [1, 3])
def test_of_the_outputs_of_several_steps_a_stage_over_tasks_gets_what_belongs_to_the_task_and_to_all(tasks):
    scale = np.arange(tasks, dtype=np.float32)
    given = (Mixed(scale, np.float32(10)), Mixed(2 * scale, np.float32(20)))
    stage = Stage(spread_of, EACH_STEP, over="tasks", reads={"mixed": "samples"})
    found = call(stage, {"at": At(0, 0)}, {"mixed": given}, map)
    np.testing.assert_array_equal(found.scale, 3 * scale)
    np.testing.assert_array_equal(found.ends["last"], np.stack([scale + 10, 2 * scale + 20], axis=-1))


BUFFER = np.zeros((1, 2), np.float32)


def in_a_buffer(*, params: TaskParams) -> TaskParams:
    np.copyto(BUFFER, params.params["w"])
    return TaskParams({"w": BUFFER})


def test_a_stage_over_tasks_may_use_a_buffer_again():
    params = TaskParams({"w": np.arange(6, dtype=np.float32).reshape(3, 2)})
    found = call(Stage(in_a_buffer, EACH_STEP, over="tasks"), {"at": At(0, 0)}, {"params": params}, map)
    np.testing.assert_array_equal(found.params["w"], params.params["w"])


def test_what_a_stage_loads_of_a_span_shares_no_memory_with_what_is_to_be_stored():
    stored = TaskParams({"w": np.zeros((3, 2), np.float32)})
    span = SpanOutputs(Span(("adapt",), 0, 1), ON_POLICY, CONFIG, Mock(load=lambda ref: stored))
    loaded = span.load(StageRef(1, "adapt")).params["w"]
    assert not np.shares_memory(loaded, stored.params["w"])
    assert (loaded.flags.writeable, stored.params["w"].flags.writeable) == (False, True)


def test_a_stage_over_tasks_has_to_give_something_of_every_task():
    for function, output in ((together, "Total"), (mixed, "Mixed")):
        with pytest.raises(GraphError, match=f"{function.__name__} is over tasks, but returns {output}, which does no"):
            Stage(function, EACH_STEP, over="tasks")


def of_tasks(*, samples: Samples, tasks: TaskBatch) -> Samples:
    return samples


def kept(*, params: TaskParams) -> TaskParams:
    return params


def blend(*, samples: Samples, before: Samples | None = None) -> Samples:
    return samples


IN_TRAINING_ONLY = ON_POLICY.insert(Stage(of_tasks, EACH_STEP), after="process_samples", gives="samples")
SAME_STEP = (
    ON_POLICY.insert(Stage(kept, EACH_STEP, reads={"params": "acting"}), after="sample_tasks")
    .edge(kept=this_step("kept"))
    .replace("collect_rollouts", ON_POLICY["collect_rollouts"].reading(params="kept"))
)


def test_an_input_without_a_default_has_to_have_an_output_to_read():
    before = ON_POLICY.edge(before=last_iteration("process_samples")).insert(
        Stage(smooth, EACH_STEP, reads={"samples": "before"}), after="process_samples"
    )
    assert before.inputs(CONFIG, StageRef(1, "smooth")) == {"samples": StageRef(0, "process_samples")}
    with pytest.raises(
        GraphError, match=r"smooth\(i=0, k=0\) reads samples from before = .*, which has no output there"
    ):
        before.inputs(CONFIG, StageRef(0, "smooth"))
    adapted = Stage(kept, EACH_STEP, reads={"params": "own"})
    last = ON_POLICY.edge(own=this_step("adapt")).insert(adapted, after="adapt")
    assert last.inputs(CONFIG, StageRef(1, "kept")) == {"params": StageRef(1, "adapt")}
    with pytest.raises(GraphError, match=r"kept\(i=1, k=1\) reads params from own = .*, which has no output there"):
        last.inputs(CONFIG, StageRef(1, "kept", 1))


def test_stages_that_adapt_read_what_there_is_after_training_too():
    of_graph = IN_TRAINING_ONLY["of_tasks"]
    assert of_graph in IN_TRAINING_ONLY.adapting
    with pytest.raises(GraphError, match=r"of_tasks reads tasks from tasks = .*, which exists in training only"):
        IN_TRAINING_ONLY.inputs_of_adaptation(CONFIG, of_graph, 0)
    found = ON_POLICY.inputs_of_adaptation(CONFIG, ON_POLICY["process_samples"], 1)
    assert StageRef(0, "collect_rollouts", 1) in found.values()
    expected = {"samples": StageRef(0, "process_samples", 2), "params": None}  # the run itself has two steps
    found = ON_POLICY.inputs_of_adaptation(CONFIG, ADAPT, 2)
    assert {name: found[name] for name in expected} == expected
    blended = Stage(blend, EACH_STEP, reads={"samples": "samples", "before": "before"})
    graph = ON_POLICY.edge(before=last_step("process_samples")).insert(blended, after=PROCESS_SAMPLES, gives="samples")
    assert graph.inputs_of_adaptation(CONFIG, graph["blend"], 1) == {"samples": StageRef(0, "process_samples", 1)}


def test_tasks_act_with_what_the_step_before_has_given():
    assert ON_POLICY.adaptation == (ON_POLICY["collect_rollouts"], ON_POLICY["adapt"])
    with pytest.raises(GraphError, match=r"collect_rollouts acts on parameters from kept in the same inner step"):
        _ = SAME_STEP.adaptation


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (lambda b: None, r"for task 0 returned NoneType; expected TaskParams, its declared output"),
        (lambda b: params_of(w=2), "for task 0 returned arrays of 2 tasks; return arrays of this task only"),
        (lambda b: params_of(w=1 + (b == 1)), "for task 1 returned arrays of 2 tasks"),
        (lambda b: params_of(w=1, **({"more": 1} if b else {})), r"for task 1 .* only one has params\['more'\]"),
        (
            lambda b: params_of(**dict.fromkeys("zxv" if b else "wuy", 1)),
            f"for task 1 .* only one has {', '.join(rf'params.{name!r}.' for name in 'uvwxyz')}; return the same",
        ),
    ],
    ids=["nothing", "two tasks", "two tasks later", "one array more", "another array"],
)
def test_what_a_stage_over_tasks_returns_for_a_task_is_of_this_task(given, problem):
    def odd(at: At, *, params: TaskParams) -> TaskParams:
        return given(at.task)

    stage = Stage(odd, EACH_STEP, over="tasks", reads={"params": "learner"})
    with pytest.raises(GraphError, match=f"stage odd is over tasks, and {problem}"):
        call(stage, {"at": At(0, 0)}, {"params": params_of(w=3)}, map)


def params_of(**sizes):
    return TaskParams({name: np.zeros((size, 1), np.float32) for name, size in sizes.items()})
