"""Values that cannot be are refused where they are made, and those at the limit are taken."""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Tuple

from metaloom.pipeline import arithmetic, memory, shown
from metaloom.pipeline.algorithms.actor_critic.settings import A2C
from metaloom.pipeline.algorithms.contract import Learner, _require_methods
from metaloom.pipeline.algorithms.maml.settings import MAMLPPO, MAMLTRPO, DiceMAML, ProMP
from metaloom.pipeline.algorithms.off_policy.settings import DQL, SAC, OffPolicySettings
from metaloom.pipeline.building import measures_of
from metaloom.pipeline.comparison.scores import Scores
from metaloom.pipeline.config.input import ConfigError, override
from metaloom.pipeline.config.run import RunConfig, build_config, build_stored
from metaloom.pipeline.dataflow.outputs import SpanOutputs
from metaloom.pipeline.dataflow.refs import Span, StageRef
from metaloom.pipeline.envs import answers
from metaloom.pipeline.envs.answers import as_integers, facts_in
from metaloom.pipeline.envs.bandit import BernoulliBandit
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.contract import Component, EnvError, Fact
from metaloom.pipeline.envs.facts import component_facts
from metaloom.pipeline.envs.flattening import flat
from metaloom.pipeline.envs.half_cheetah import PearlCheetahVel
from metaloom.pipeline.envs.point_corner import PointCorner
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.envs.task_classes import Classes, bins
from metaloom.pipeline.envs.wrappers import PolicyActions, SingleTask, observe_places
from metaloom.pipeline.estimation.diagnostics import with_own
from metaloom.pipeline.lazy import lazily
from metaloom.pipeline.nn.spec import NetworkSpec, convolutions, of_encoder
from metaloom.pipeline.policies.actors.contract import Actor
from metaloom.pipeline.policies.config import EncoderConfig, PolicyConfig
from metaloom.pipeline.replay.index import TaskIndex
from metaloom.pipeline.types import EpisodeBatch, LearnerState, Minibatches, Samples, Step, TaskBatch
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


def config(**changes: object) -> RunConfig:
    return build_config({"env": "point-corner", "algorithm": "promp", **changes})


def samples(*shape: int) -> Samples:
    return Samples(*[np.zeros(shape, np.float32)] * 4)


def step(length: int, *, of: int) -> Step:
    return Step(Mock(rewards=np.zeros((1, 1, of))), samples(1, 1, length), 0)


def described(*names: str) -> object:
    env = PointCorner()
    env.observation_components = [Component(name) for name in names]
    return component_facts(env)


def switches(number: int) -> int:
    env = CartPoleEnv()
    env.action_space = MultiBinary(number)
    actions = PolicyActions(SingleTask(env), None).action_space
    assert isinstance(actions, Discrete)
    return int(actions.n)


def room(*shape: int) -> None:
    memory.require_room({"b": (3,), "w": shape, "c": (4,)}, setting="net")


def diagnosed(name: str) -> None:
    measures_of(config(env={"name": name, "diagnostics": True}), make_env(EnvConfig(name=name)))


def in_encoder(message: str) -> None:
    with of_encoder():
        raise ConfigError(message)


class Endless(Learner[Any, Any]):
    """Does nothing."""


class Short(Endless):
    """Updates without experience."""

    def initialize(self, *, run_seed):
        return LearnerState({})

    def update(self, state):
        return state, {}


LACKING: Any = Mock(__abstractmethods__=["update", "initialize"])


class Idle(Actor):
    act = Mock()


class Unlearned(ProMP):
    learner = ""


@pytest.mark.parametrize(
    ("make", "required"),
    [
        (lambda: StageRef(0, "Adapt"), "expected lowercase letters, digits and _"),
        (lambda: StageRef(-1, "adapt"), "iteration -1 and step 0; expected 0 to 99999999"),
        (lambda: StageRef(10**8, "adapt"), "expected 0 to 99999999"),
        (lambda: StageRef(0, "adapt", -1), "step -1; expected"),
        (lambda: StageRef(0, "adapt", 10**4), "expected .* 0 to 9999"),
        (lambda: Span((), 0, 1), "it needs one stage or more"),
        (lambda: Span(("adapt",), 2, 1), "iterations 2 to 1; it needs .* in ascending order"),
        (lambda: Span(("adapt",), -1, 1), "iterations -1 to 1; it needs .* in ascending order"),
        (lambda: SPAN.lengths(StageRef(3, "adapt")), "not among the outputs that were declared"),
        (lambda: bandit(0.5, 1.001), "1.001.; expected probabilities"),
        (lambda: bandit(-0.001, 0.5), ".-0.001.*; expected probabilities"),
        (lambda: PointCorner(success_radius=0.0), "is 0.0; expected a length above 0"),
        (lambda: PointCorner(success_radius=np.inf), "is inf; expected a length above 0"),
        (lambda: PearlCheetahVel(num_train_tasks=0), "num_train_tasks must be a positive integer, got 0"),
        (lambda: PearlCheetahVel(num_test_tasks=1.5), "num_test_tasks must be a positive integer, got 1.5"),
        (lambda: index(1, 0), "iteration 0 after iteration 1; append them in order"),
        (lambda: index(0, tasks=2), r"for 2 tasks; expected \[B, E\]"),
        (lambda: minibatches(2, 3), r"expected \[U, K, N\]"),
        (lambda: tasks(["x", "y"], ["m"]), "one unit per name"),
        (lambda: Scores((np.ones(1),), ()), "got scores for 1 runs and strata for 0"),
        (lambda: noisy(1), "estimated from differences between tasks"),
        (lambda: A2C(critic_network_options={"x": 1}), "options is {'x': 1} but critic_network is not set"),
        (lambda: EnvConfig(name="a:B", observed=(0, 1, 0)), r"got \[0, 1, 0\]; each index may appear only once"),
        (lambda: build_stored({"algorithm": "promp"}), "expected algorithm settings with a name, got 'promp'"),
        (lambda: build_stored({"algorithm": {"name": "promp"}, "env": []}), "expected env settings with a name, got "),
        (lambda: build_stored({"algorithm": {"num_epochs": 1}}), "with a name, got {'num_epochs': 1}"),
        (lambda: config(algorithm=3), "expected the name of an algorithm, or a mapping that contains a name"),
        (lambda: config(algorithm={"num_epochs": 1}), "expected the name of an algorithm, or a mapping that contains"),
        (lambda: EncoderConfig(name="gru"), "got gru; expected cnn, mlp, or module:Class"),
        (lambda: EncoderConfig(name="residual"), "got residual; expected cnn, mlp, or module:Class"),
        (lambda: PolicyConfig(network="a:B", activation="relu"), "activation is relu but network is a:B, which has"),
        (lambda: PolicyConfig(network="a:B", output_activation="tanh"), "output_activation is tanh but network is a:B"),
        (lambda: with_own({"a": 1.0, "b": 1.0}, {"b": 2.0}), "metrics: every run already has b;"),
        (lambda: with_own(dict.fromkeys("fbdace", 1.0), dict.fromkeys("ecabfd", 1.0)), "has a, b, c, d, e, f; return"),
        (lambda: bins("v", (1,)).of(np.zeros((1, 1)), ["x"]), r"the task fields \['x'\] lack \['v'\]"),
        (lambda: Classes.from_facts({"fields": 3}), "task_classes: got {'fields': 3}; expected the result of"),
        (lambda: EpisodeBatch(*[np.zeros((1, 2))] * 9), r"rewards has shape \(1, 2\); expected \[B, E, T\]"),
        (lambda: samples(1, 2), r"Samples.returns has shape \(1, 2\); expected \[B, E, T\]"),
        (lambda: step(3, of=2), r"samples have shape \[1, 1, 3\] but episodes \[1, 1, 2\]"),
        (lambda: observe_places(CartPoleEnv(), [0, 4]), r"env.observed is \[0, 4\], but the observation space"),
        (lambda: switches(13), "13. with 8,192 combinations, each of which .*; at most 4,096 are supported"),
        (lambda: make_env(EnvConfig(name="point-corner", observed=(0,))), r"\[0\] but point-corner is a MetaEnv"),
        (lambda: make_env(EnvConfig(name="point-corner", facts={"a": "b"})), "has a but point-corner is a MetaEnv"),
        (lambda: as_integers(np.array([1.0, 0.5]), np.dtype(np.uint8)), "got 0.5 in the obs.*integers of type uint8"),
        (lambda: as_integers(np.array([256]), np.dtype(np.uint8)), "got 256 in the obs.*integers of type uint8"),
        (lambda: facts_in({"facts": 3}, [Fact("a")]), r'got int 3 as info\["facts"\]; expected a dict of numbers'),
        (lambda: facts_in({"facts": {"c": 1, "b": 2}}, [Fact("d")]), r"got \['b', 'c'\]; expected the .*, \['d'\], in"),
        (lambda: facts_in({"facts": {"a": 2}}, [Fact("a", "flag")]), "got int 2 as fact a; expected True or False"),
        (lambda: flat(Dict(a=Discrete(2)), {"b": 1}), r"got \['b'\] as the observation; expected a dict of \['a'\]"),
        (lambda: flat(Dict(a=Discrete(2)), {"c": 1, "b": 1}), r"got \['b', 'c'\] as the observation; expected"),
        (lambda: flat(Dict(a=Discrete(2)), 3), r"got int as the observation; expected a dict of \['a'\]"),
        (lambda: flat(Tuple([Discrete(2)]), (1, 1)), r"got \(1, 1\) as the observation; expected a tuple of 1 parts"),
        (lambda: flat(Tuple([Discrete(2)]), 1), "got 1 as the observation; expected a tuple of 1 parts"),
        (lambda: flat(Dict(a=Box(0, 1, (2,))), {"a": np.zeros(3)}), r"shape \(3,\) as the observation\['a'\]; exp"),
        (lambda: flat(Box(0, 1, (2,)), 0.5), r"dtype float64 and shape \(\) as the observation; expected .*\(2,\)"),
        (lambda: flat(Box(0, 1, (1,)), np.zeros(3)), r"dtype float64 and shape \(3,\) as the observation; expected"),
        (lambda: answers.reward_terms_of(0.0, {"reward_terms": {"a": 1.5e-6}}), "sums to 1.5e-06, but the reward is 0"),
        (lambda: answers.reward_terms_of(1000.0, {"reward_terms": {"a": 1000.0015}}), "sums to 1000.0015, but"),
        (lambda: flat(Box(0, 1, (1,)), "a"), r"got dtype <U1 and shape \(\) as the observation; expected numbers"),
        (lambda: described("x"), "observation_components: got 1 components; expected 2, one for each number"),
        (lambda: described("x", "x"), "observation_components: invalid name 'x'; names must be unique"),
        (lambda: described("x", "a b"), "observation_components: invalid name 'a b'; names must be unique"),
        (lambda: diagnosed("point-corner"), "env.diagnostics is on, but point-corner has none; remove it"),
        (lambda: convolutions(NetworkSpec("cnn", (64, 64, 3), 1, options={"x": 1})), "policy.network_options for cnn"),
        (lambda: in_encoder("policy.network_options for cnn: x"), "^policy.encoder.options for cnn: x$"),
        (lambda: in_encoder("policy.network: x"), "^policy.encoder: x$"),
        (lambda: _require_methods(Endless, "a:B"), "a:B lacks the method initialize; define"),
        (lambda: _require_methods(LACKING, "a:B"), r"lacks the method initialize; define initialize\(.*, update\("),
        (lambda: _require_methods(Short, "a:B"), r"stages cannot call update of a:B \(.*\); its"),
        (lambda: Unlearned().build(Mock()), ":Unlearned names no learner; set learner"),
        (lambda: override({"iterations": 3}, ["iterations.x=1"]), "iterations is a value, not a section"),
        (lambda: override({}, ["a=["]), "the value is not valid YAML"),
        (lambda: room(2, 10**14, 3), r"net: .* at least 9,600,000.0 GB of memory \(w has the shape \(2, 10+, 3\)\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_what_is_required(make: Callable[[], object], required: str) -> None:
    with pytest.raises(ValueError, match=required):
        make()


def test_what_is_at_the_limit_is_taken() -> None:
    assert (StageRef(10**8 - 1, "adapt", 10**4 - 1).step, StageRef(0, "a1_").step) == (9999, 0)
    assert StageRef(1, "adapt") in Span(("adapt",), 1, 1)
    bandit(0.0, 1.0)
    assert switches(12) == 4096
    assert PointCorner(success_radius=1e-9).success_radius == 1e-9
    index(-1, 0, 0, 1)
    assert minibatches(1, 1, 1).rows.shape == (*tasks(["x"], ["m"]).params.shape, 1)
    noisy(2)
    assert override({}, ["a.b=1"]) == {"a": {"b": 1}}
    cheetah = PearlCheetahVel(num_train_tasks=1, num_test_tasks=1)
    assert (len(cheetah.task_set or ()), len(cheetah.test_task_set or ())) == (1, 1)
    assert DQL(eps_init=0.25, eps_final=0.25).epsilon(3) == 0.25
    assert SAC(memory_size=64, batch_size=64).init_memory_steps == 64
    assert config(algorithm=MAMLPPO(num_minibatches=6), episodes_per_task=2, max_episode_steps=3).episodes_per_task == 2
    assert config(algorithm=DiceMAML(num_minibatches=2), episodes_per_task=2).episodes_per_task == 2
    assert config(algorithm=MAMLTRPO(), episodes_per_task=1, max_episode_steps=1).max_episode_steps == 1
    assert config(algorithm="a2c", episodes_per_task=2, min_rollouts=2).min_rollouts == 2
    warm = [config(init_from=text).init_from for text in ("a@3", "a@b", "a@b@2", "a")]
    assert [(one and one.run, one and one.updates) for one in warm] == [
        ("a", 3),
        ("a@b", None),
        ("a@b", 2),
        ("a", None),
    ]
    warned = [[*MAMLPPO(inner_loss="clipped", num_epochs=n).warnings()] for n in (1, 2)]
    assert [len(found) for found in warned] == [0, 1]
    assert answers.number_of(np.finfo(np.float32).max, "x") == float(np.finfo(np.float32).max)
    assert answers.reward_terms_of(1000.0, {"reward_terms": {"a": 1000.001}}) == {"a": 1000.001}
    largest = np.finfo(np.float32).max
    assert answers.wrong_number(np.full((1, 2), largest)) is None
    answers.check_facts({"a": np.array([largest])}, [Fact("a")], np.arange(1))
    for other in (["round"], [("a",)], {"gravity": 9.81}):  # facts that are no declaration of ours
        env = CartPoleEnv()
        env.facts = other  # pyright: ignore[reportAttributeAccessIssue]
        assert answers.declared_facts(env) == ()
    assert answers.flag_of(np.True_, "x") is True
    assert flat(Dict(a=Box(0, 1, (2,))), {"a": np.ones(2)}).tolist() == [1, 1]
    assert flat(Box(0, 1, (1,)), 0.5).tolist() == [0.5]
    assert [facts_in({"facts": {"a": value}}, [Fact("a", "flag")])["a"] for value in (0, 1, True)] == [0, 1, 1]
    assert facts_in({"facts": {"a": 2.5}}, [Fact("a")]) == {"a": 2.5}
    assert facts_in({"facts": {"b": 1, "a": 2}}, [Fact("a"), Fact("b")]) == {"a": 2, "b": 1}
    assert facts_in({"facts": {"a": 1, "b": 2}}, [Fact("b"), Fact("a")]) == {"a": 1, "b": 2}


def test_the_memory_is_what_the_lowest_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"open": "max\n", "low": "4800\n", "lower": "3200\n", "high": f"{10**18}\n"}
    for name, text in limits.items():
        (tmp_path / name).write_text(text)

    def limited(*names: str) -> int:
        monkeypatch.setattr(memory, "_CGROUP_LIMITS", tuple(str(tmp_path / name) for name in names))
        return memory.machine_memory()

    assert limited() == limited("none", "open", "high") > 10**8
    assert limited("low", "lower") == limited("lower", "low") == 3200
    room(2, 96)  # 16 bytes for each of 199 numbers
    with pytest.raises(ConfigError):
        room(2, 97)


def test_facts_of_machine_code_have_one_order_and_no_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = ("Cooperlake", "Haswell", "Nehalem", "Prescott", "Sandybridge", "Zen")
    libraries = [
        {"user_api": api, "internal_api": api, "architecture": code}
        for api, code in (("openmp", None), *(("blas", name) for name in (*reversed(codes), "Zen")))
    ]
    monkeypatch.setattr(arithmetic, "threadpool_info", lambda: libraries)
    assert arithmetic.blas_facts() == tuple(f"blas {code}" for code in codes)
    monkeypatch.setattr(arithmetic, "blas_facts", lambda: ("zlib", "blas Zen"))
    monkeypatch.setattr(arithmetic, "numpy_facts", lambda: "AVX2")
    assert arithmetic.acting_facts() == ("blas Zen", "numpy AVX2", "zlib")
    assert arithmetic.lacking("torch", "AVX2", {"f16c"}) == "the processor lacks avx2 fma"
    assert arithmetic.lacking("torch", "AVX2", {"avx2", "fma"}) == ""


def test_text_is_cut_in_the_middle_and_only_beyond_its_most() -> None:
    most = 2000
    assert shown.error_text(ValueError("x" * most)) == "x" * most
    text = "".join(f"{n:05d}" for n in range(most))
    first, more, last = shown.error_text(ValueError(text)).split(" ... ")
    assert more == f"({len(text) - most:,} more characters)"
    assert text.startswith(first)
    assert text.endswith(last)
    assert (len(first), len(last)) == (1500, 500)


def test_what_is_imported_late_leaves_the_collection_of_garbage_as_it_is() -> None:
    try:
        for collect in (gc.disable, gc.enable):
            collect()
            collects = gc.isenabled()
            assert callable(lazily("metaloom.storage.read.late")("to_xarray"))
            assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_sizes_rows_and_data_are_shown_in_the_form_that_fits() -> None:
    sizes = [shown.size(n) for n in (0, 999, 1000, 1500, 10**6, 28_300_000, 10**9, 10**12)]
    assert sizes == ["0 B", "999 B", "1 kB", "1.5 kB", "1 MB", "28.3 MB", "1 GB", "1 TB"]
    rows = [(f"{n}",) for n in range(shown.MOST_ROWS)]
    assert shown.as_text("x", rows).splitlines() == ["x", *(f"  {n}" for n in range(40))]
    assert shown.as_text("x", [*rows, ("",)]).splitlines()[-2:] == ["  38", "  and 2 more"]
    data = {"a": np.float32(1.5), 2: (np.array([1, 2]), None, True), "b": [np.inf, -np.inf, np.nan, b"x"]}
    expected = {"a": 1.5, "2": [[1, 2], None, True], "b": ["inf", "-inf", "nan", "bytes"]}
    assert shown.plain_data(data, lambda value: type(value).__name__) == expected


def test_errors_of_environments_are_cut_to_what_tells_most() -> None:
    assert answers.last_line(ValueError("x" * 488)) == f"ValueError: {'x' * 488}"
    assert answers.last_line(ValueError("x" * 489)) == f"ValueError: {'x' * 485}..."
    assert answers.shown("x" * 74) == f"str '{'x' * 74}'"
    assert answers.shown("x" * 75) == f"str '{'x' * 72}..."
    assert answers.own_traceback(ValueError("x" * 5987)) == f"ValueError: {'x' * 5987}\n"
    numbers = " ".join(map(str, range(2000)))
    found = answers.own_traceback(ValueError(numbers))
    assert found == f"...\n{f'{numbers}{chr(10)}'[-6000:]}"
    assert answers.own_traceback(None) == answers.own_traceback(EnvError(numbers)) == ""


def test_what_a_class_does_not_define_is_named_with_the_class() -> None:
    with pytest.raises(NotImplementedError, match="Short has no `process`, which process_samples calls"):
        Short().process(Mock(), Mock(), seed=0)
    with pytest.raises(NotImplementedError, match=r"Idle keeps no memory \(\(2, 3\)\)"):
        Idle.__new__(Idle).recall(Mock(state=np.zeros((2, 3))))
    with pytest.raises(NotImplementedError):
        OffPolicySettings().plan(episodes_per_task=1, max_episode_steps=1)
    with pytest.raises(AttributeError, match=r"module 'metaloom.storage.read.late' has no attribute 'nothing'"):
        lazily("metaloom.storage.read.late")("nothing")
