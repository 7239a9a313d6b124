"""Stages: functions on batches, with the frequency at which they run and the edges that they read."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Literal, Self

import numpy as np

from metaloom.pipeline import types
from metaloom.pipeline.config.run import RunConfig
from metaloom.pipeline.dataflow.refs import NAME, Span, StageRef
from metaloom.pipeline.outputs import OutputSchema, as_declared
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.seeding import own_generator, seed_for
from metaloom.pipeline.types import Array, ParallelMap

Input = StageRef | tuple[StageRef, ...] | Span
"""Input of a stage: one output, the outputs of several steps, or a span."""

STEP = "{step}"
"""Placeholder for the inner step in a stored group's name."""

TOOLS: Mapping[str, str] = {
    "at": "the position: run seed, iteration and inner step",
    "config": "the settings of the run",
    "setup": "the sizes that the learner was built for",
    "learner": "the algorithm",
    "env": "one environment of the run, for its spaces and tasks",
    "rollouts": "collects episodes",
    "parallel": "maps over tasks; no result depends on it",
    "measures": "additional measurements of rollout batches",
    "adaptation": "adapts a learner by the stages of this graph",
    "tested": "receives the test episodes of an evaluation",
    "warm_start": "reads the learner that the run starts from",
}
"""Positional parameters that a stage's function may take, in addition to its graph's shared objects."""


class GraphError(ConfigError):
    """Raised for incompatible stages; the message names the stage, the edge, and a remedy."""


@dataclass(frozen=True)
class At:
    """Position at which a stage runs, which determines its random streams.

    Attributes:
        run_seed: Seed of the run or of the evaluation.
        iteration: Iteration number; 0 for adaptation after training.
        step: Inner step k.
        training: False for adaptation after training, as in evaluations and trained policies.
        task: Task index, for stages over tasks.
    """

    run_seed: int
    iteration: int
    step: int = 0
    training: bool = True
    task: int = 0

    def generator(self, name: str) -> np.random.Generator:
        """Return a generator for one of the stage's streams at this position; see `own_generator`.

        Streams after training differ from all training streams.

        Args:
            name: Stream name, such as the stage's name.
        """
        position = (self.iteration, self.step, self.task)
        if self.training:
            return own_generator(self.run_seed, name, *position)
        return own_generator(seed_for(self.run_seed, "evaluation", *position) // 2, name)


@dataclass(frozen=True)
class Per:
    """Frequency with which a stage runs.

    Attributes:
        words: Text for diagrams, such as "per iteration".
        steps: Function that maps a configuration and an iteration to the inner steps k in which the stage runs.
        stepped: True if an iteration may have several steps.
    """

    words: str
    steps: Callable[[RunConfig, int], Sequence[int]]
    stepped: bool = False


ONCE = Per("once per run", lambda config, i: () if i else (0,))
ITERATION = Per("per iteration", lambda config, i: (0,))
INNER_STEP = Per("k = 0 ... K-1", lambda config, i: range(config.algorithm.adaptation_steps), stepped=True)
EACH_STEP = Per("k = 0 ... K", lambda config, i: range(config.algorithm.adaptation_steps + 1), stepped=True)
AFTER_TRAINING = Per("after training", lambda config, i: (), stepped=True)
EVALUATION = Per(
    "every n iterations", lambda config, i: (0,) if (n := config.evaluation.every) and not (i + 1) % n else ()
)


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of a graph.

    Its function takes tools as positional parameters, named as in TOOLS, and inputs as keyword-only parameters. Inputs
    with a default may be missing, such as adapted parameters before the first inner step.

    Attributes:
        run: Function that computes the output.
        per: How often the stage runs, such as ITERATION or INNER_STEP.
        name: Stage name; default: the function's name.
        reads: Names of the graph's edges, keyed by input; default: the edge with the input's name.
        output: Type of the output: one from `metaloom.pipeline.types`, or a frozen dataclass of arrays that declare
            their axes (see `metaloom.pipeline.outputs`); default: the function's return annotation.
        group: Stored group; "{step}" is replaced by the inner step; default: the stage's name, followed by "_{step}"
            if the stage runs in inner steps.
        over: `tasks` if the function handles each task separately: it is called once per task, in any order, with the
            task's index in `at.task`.
        samples: True if the stage runs environments, so it cannot be recomputed with other algorithm settings.
        thinnable: True if thinning may remove the output's arrays, which can be recomputed.
        ends_iteration: True if the output is the next learner.
        seed_position: Function that returns the position of the stage's random draws.

    Raises:
        GraphError: the function does not declare its arguments and result.
    """

    run: Callable[..., Any]
    per: Per
    name: str = ""
    reads: Mapping[str, str] | None = None
    output: Any = None
    group: str = ""
    over: Literal["tasks"] | None = None
    samples: bool = False
    thinnable: bool = False
    ends_iteration: bool = False
    seed_position: Callable[[RunConfig, int, int], tuple[int, ...]] = lambda config, i, k: (config.seed, i, k)

    def __post_init__(self) -> None:
        if not callable(self.run) or isinstance(self.run, Stage):  # pyright: ignore[reportUnnecessaryComparison]
            raise GraphError(f"{self.run!r} is not a function, which a stage needs; use Stage(function, per, ...)")
        name = self.name or getattr(_written(self.run), "__name__", "")
        if not NAME.fullmatch(name):
            raise GraphError(
                f"the stage of {self.run!r} has the name {name!r}; use lowercase letters, digits and _, as in "
                "Stage(..., name='smooth')"
            )
        if not isinstance(self.per, Per):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(
                f"stage {name} has per={self.per!r}; expected ONCE, ITERATION, INNER_STEP, EACH_STEP or EVALUATION"
            )
        if self.over not in (None, "tasks"):
            raise GraphError(f"stage {name} is over {self.over!r}; use over='tasks' or omit it")
        output, declared = self.output, "has output="
        if output is None:
            declared = f"its function {_path(self.run)} is annotated to return "
            try:
                output = inspect.get_annotations(_written(self.run), eval_str=True).get("return")
            except Exception as problem:  # for example a name that the module does not define
                output = problem
        if not isinstance(output, type):
            raise GraphError(f"stage {name}: {declared}{output!r}; give the type of its output, as in -> Samples")
        reads = dict.fromkeys(self.inputs) if self.reads is None else self.reads
        if not (isinstance(reads, Mapping) and all(isinstance(edge, str | None) for edge in reads.values())):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"stage {name} reads {reads!r}; map inputs to names of edges: {{'state': 'learner'}}")
        if unknown := [*{*reads} ^ {*self.inputs}]:
            raise GraphError(
                f"stage {name} reads {', '.join(reads) or 'nothing'}, but its function {_path(self.run)} has the "
                f"keyword-only parameters {', '.join(self.inputs) or 'none'}; they must match ({unknown[0]} does not)"
            )
        if self.over and not fields_of_tasks(output, all_of_them=True):
            raise GraphError(
                f"stage {name} is over tasks, but returns {output.__name__}, which does not have the task axis in all "
                "its fields; return EpisodeBatch, Samples, TaskParams, or a custom class whose arrays all have "
                "the axis B"
            )
        group = self.group or (f"{name}_{STEP}" if self.per.stepped else name)
        defaults = {"name": name, "output": output, "group": group}
        defaults["reads"] = {of: reads[of] or of for of in self.inputs}
        for field, value in defaults.items():
            object.__setattr__(self, field, value)

    @cached_property
    def _parameters(self) -> Sequence[inspect.Parameter]:
        given = self.run.keywords if isinstance(self.run, partial) else {}
        found = [p for p in inspect.signature(self.run).parameters.values() if p.name not in given]
        if loose := [p for p in found if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
            raise GraphError(
                f"stage {self.name or _path(self.run)}: its function {_path(self.run)} has the parameter {loose[0]}; "
                "all parameters must be passed by name: tools, *, inputs"
            )
        return found

    @cached_property
    def tools(self) -> tuple[str, ...]:
        """Names of the function's positional parameters."""
        return tuple(p.name for p in self._parameters if p.kind != p.KEYWORD_ONLY)

    @cached_property
    def inputs(self) -> Mapping[str, bool]:
        """True for each input that may be missing, keyed by input name."""
        return {p.name: p.default is not p.empty for p in self._parameters if p.kind == p.KEYWORD_ONLY}

    @cached_property
    def annotations(self) -> Mapping[str, Any]:
        """Annotations of the function, or {} if they cannot be evaluated."""
        try:
            return inspect.get_annotations(_written(self.run), eval_str=True)
        except Exception:  # names imported only for type checkers
            return {}

    @property
    def edges(self) -> Mapping[str, str]:
        """Name of the edge that each input reads, keyed by input name."""
        assert self.reads is not None, "set in construction"
        return self.reads

    @property
    def stepped(self) -> bool:
        """True if an iteration may have several outputs, one per inner step."""
        return STEP in self.group

    def at(self, i: int, k: int = 0) -> StageRef:
        """Return a reference to the stage's output in iteration i and inner step k."""
        return StageRef(i, self.name, k)

    def as_declared(self, value: Any) -> Any:
        """Convert an output to the class that the stage declares as its output."""
        return value if self.output.__module__ == types.__name__ else as_declared(self.output, value)

    def reading(self, **edges: str) -> Self:
        """Return the stage with some inputs redirected to other edges."""
        return replace(self, reads={**self.edges, **edges})


def tools_of(make: Callable[..., object]) -> Sequence[str]:
    """Return the names of the tools that a shared object's factory function takes."""
    try:
        found = inspect.signature(make).parameters.values()
    except ValueError:  # a class written in C, such as dict
        return []
    return [p.name for p in found if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


@cache
def fields_of_tasks(kind: type[Any], *, all_of_them: bool = False) -> tuple[str, ...]:
    """Return the names of an output class's fields whose first axis is the task axis.

    With `all_of_them`, return () unless every field has that axis.
    """
    if kind in (types.EpisodeBatch, types.Samples, types.TaskParams):
        return tuple(f.name for f in fields(kind))
    if kind.__module__ == types.__name__ or not is_dataclass(kind):
        return ("params", "ids") if kind is types.TaskBatch and not all_of_them else ()
    found = tuple(f.name for f in OutputSchema.of(kind).fields if f.dims[:1] == ("task",))
    return () if all_of_them and len(found) < len(fields(kind)) else found


def _written(function: Callable[..., Any]) -> Callable[..., Any]:
    """Unwrap any `functools.partial` and return the underlying function."""
    return _written(function.func) if isinstance(function, partial) else function


def _path(function: Callable[..., Any]) -> str:
    written = _written(function)
    return f"{written.__module__}:{getattr(written, '__qualname__', repr(written))}"


def call(stage: Stage, tools: Mapping[str, Any], inputs: Mapping[str, Any], parallel: ParallelMap) -> Any:
    """Call a stage's function with its tools and inputs, task by task if the stage is over tasks.

    Raises GraphError if the inputs or outputs of a stage over tasks do not have a suitable task axis.
    """
    positional = [tools[name] for name in stage.tools]
    if stage.over is None:
        return stage.run(*positional, **inputs)
    sizes = set[int]().union(*map(_sizes, inputs.values()))
    if len(sizes) != 1:
        raise GraphError(
            f"stage {stage.name} is over tasks, but its inputs have {sorted(sizes) or 'no'} tasks; all inputs must "
            "have the same number of tasks"
        )

    def one(b: int) -> Any:
        at = replace(tools["at"], task=b)
        given = [at if name == "at" else tool for name, tool in zip(stage.tools, positional, strict=True)]
        found = stage.run(*given, **{name: _cut(value, b) for name, value in inputs.items()})
        # A copy, since the function may use the same memory for every task.
        return deepcopy(found) if isinstance(found, stage.output) else found

    return _joined(stage, [*parallel(one, range(*sizes))])


def _arrays(value: Any) -> dict[tuple[str, str | None], Array]:
    """Return the arrays whose first axis is the task axis, keyed by (field, name in a mapping or None)."""
    found = dict[tuple[str, str | None], Array]()
    for name in fields_of_tasks(type(value)):
        part = getattr(value, name)
        if isinstance(part, Mapping):
            found |= {(name, key): array for key, array in part.items()}
        elif part is not None:
            found[name, None] = part
    return found


def _with(value: Any, arrays: Mapping[tuple[str, str | None], Array]) -> Any:
    parts = dict[str, Any]()
    for (name, key), array in arrays.items():
        if key is None:
            parts[name] = array
        else:
            parts.setdefault(name, {})[key] = array
    return replace(value, **parts) if parts else value


def _sizes(value: Any) -> set[int]:
    return {len(array) for one in (value if isinstance(value, tuple) else (value,)) for array in _arrays(one).values()}


def _cut(value: Any, b: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_cut(one, b) for one in value)
    return _with(value, {path: array[b : b + 1] for path, array in _arrays(value).items()})


def _joined(stage: Stage, values: Sequence[Any]) -> Any:
    parts = list[dict[tuple[str, str | None], Array]]()
    for b, value in enumerate(values):
        where = f"stage {stage.name} is over tasks, and for task {b} returned"
        if not isinstance(value, stage.output):
            raise GraphError(f"{where} {type(value).__name__}; expected {stage.output.__name__}, its declared output")
        parts.append(_arrays(value))
        if sizes := {len(array) for array in parts[b].values()} - {1}:
            raise GraphError(
                f"{where} arrays of {max(sizes)} tasks; return arrays of this task only, with a first axis of length 1"
            )
        if other := parts[b].keys() ^ parts[0].keys():
            names = sorted(name if key is None else f"{name}[{key!r}]" for name, key in other)
            raise GraphError(
                f"{where} different arrays than for task 0: only one has {', '.join(names)}; return the same "
                "arrays for every task"
            )
    return _with(values[0], {path: np.concatenate([part[path] for part in parts]) for path in parts[0]})
