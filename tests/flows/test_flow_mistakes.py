"""Mistakes in a user's stages, graphs, learners and policies: each is refused by a sentence that says what to do."""

import faulthandler
import importlib
import logging
import os
import random
import re
import signal
import sys
import threading
import time
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

import metaloom
from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import resume, train
from metaloom.flows.copied import result_in_copy
from metaloom.flows.observer import Observer
from metaloom.flows.operations.evaluate import evaluate
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline import global_random
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.global_random import GlobalRandomWatch
from metaloom.pipeline.schema import ConfigError
from metaloom.stages.faults import StageFault
from metaloom.storage.write.publisher import Publisher

SERIAL = Backend(workers=0)
FLOW = '''
import random
import os
import sys
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from numpy.typing import NDArray
from torch import nn

from metaloom.pipeline.algorithms.contract import AlgorithmSettings, Learner
from metaloom.pipeline.algorithms.maml.promp import ProMPLearner
from metaloom.pipeline.algorithms.maml.settings import ProMP
from metaloom.pipeline.baselines.config import BaselineSettings
from metaloom.pipeline.dataflow.edges import every_step, last_iteration, since_start, this_step
from metaloom.pipeline.dataflow.stage import EACH_STEP, EVALUATION, INNER_STEP, ITERATION, Stage
from metaloom.pipeline.nn.distributions import DiagGaussian
from metaloom.pipeline.outputs import Axes
from metaloom.pipeline.policies.contract import OwnPolicy
from metaloom.pipeline.types import EpisodeBatch, Evaluation, Samples, TaskBatch, TaskParams, Update
from metaloom.pipeline.dataflow.outputs import SpanOutputs
from metaloom.stages.collect_rollouts import COLLECT_ROLLOUTS
from metaloom.stages.evaluate import EVALUATE, evaluate
from metaloom.stages.faults import StageFault
from metaloom.stages.graphs.on_policy import ON_POLICY
from metaloom.stages.meta_optimize import META_OPTIMIZE



class HasAdvantages(Protocol):  # an annotation that is not judged
    advantages: np.ndarray


def halve(*, samples: HasAdvantages) -> Samples:
    return replace(samples, advantages=(samples.advantages / 2).astype(np.float32))


def drawing(*, samples: Samples) -> Samples:
    return replace(samples, advantages=samples.advantages + np.float32(random.random()))


def all_halved(*, samples: tuple[Samples, ...]) -> Samples:
    return halve(samples=samples[0])


def of_tasks(*, samples: Samples, tasks: TaskBatch) -> Samples:
    return halve(samples=samples)


def rewarded(*, episodes: EpisodeBatch) -> EpisodeBatch:
    time = np.arange(episodes.rewards.shape[2])
    return replace(episodes, rewards=((episodes.rewards + np.sin(time)) * episodes.mask).astype(np.float32))


def kept(learner, *, params: Update | TaskParams) -> TaskParams:
    return params if isinstance(params, TaskParams) else learner.acting_params(params.learner, 4)


def none_of_a_task(*, samples: Samples) -> Samples:
    return None


def twice_a_task(*, params: TaskParams) -> TaskParams:
    return TaskParams({name: np.concatenate((value, value)) for name, value in params.params.items()})


def more_of_a_task(at, *, params: TaskParams) -> TaskParams:
    return TaskParams({**params.params, **({"more": np.zeros((1, 2), np.float32)} if at.task else {})})


def remembering(memo, at, *, samples: Samples) -> Samples:
    memo[at.iteration, at.step] = 2
    return replace(samples, advantages=samples.advantages * np.float32(memo.get((at.iteration - 1, at.step), 1)))


def clipped_in_place(*, samples: Samples) -> Samples:
    return replace(samples, advantages=torch.from_numpy(samples.advantages).clamp_(-0.1, 0.1).numpy().copy())


def in_a_buffer(*, samples: Samples) -> Samples:
    buffer = BUFFERS.setdefault(samples.advantages.shape, torch.zeros(samples.advantages.shape))
    return replace(samples, advantages=buffer.copy_(torch.tensor(samples.advantages)).numpy())


def summed_in_a_buffer(*, samples: Samples) -> Samples:
    buffer = BUFFERS.setdefault(samples.advantages.shape, torch.zeros(samples.advantages.shape))
    return replace(samples, advantages=buffer.add_(torch.tensor(samples.advantages) + 1).numpy())


def clipped_later(at, *, samples: Samples) -> Samples:
    return clipped_in_place(samples=samples) if at.iteration == 2 else samples


def over_spread(at, *, samples: Samples) -> Samples:
    spread = BUFFERS.setdefault((at.iteration, at.step), samples.advantages.std() + np.float32(1))
    return replace(samples, advantages=samples.advantages / spread)


def ending(*, samples: Samples) -> Samples:
    os._exit(0)


class Halt(BaseException):
    pass


def halting(*, samples: Samples) -> Samples:
    raise Halt("enough")


def exiting_the_second_time(*, samples: Samples) -> Samples:
    BUFFERS["exits"] = BUFFERS.get("exits", 0) + 1
    return samples if BUFFERS["exits"] == 1 else sys.exit()


def as_first(at, *, samples: Samples) -> Samples:
    spread = BUFFERS.setdefault(at.step, samples.advantages.std() + np.float32(1))
    return replace(samples, advantages=samples.advantages / spread)


BUFFERS = {}


def masked(*, samples: Samples) -> Samples:
    return replace(samples, advantages=np.ma.masked_array(samples.advantages, mask=samples.advantages > 0))


def less_the_task_before(at, *, samples: Samples) -> Samples:
    BUFFERS[at] = samples.advantages.mean()
    before = BUFFERS.get(replace(at, task=at.task - 1), np.float32(0))
    return replace(samples, advantages=(samples.advantages - before) * samples.mask.astype(np.float32))


def by_the_iteration_before(at, *, samples: Samples) -> Samples:
    BUFFERS["times", at.iteration, at.step] = 2
    times = BUFFERS.get(("times", at.iteration - 1, at.step), 1) if at.iteration > 2 else 1
    return replace(samples, advantages=samples.advantages * np.float32(times))


def in_columns(*, samples: Samples) -> Samples:
    found = replace(samples, advantages=np.asfortranarray(samples.advantages))
    object.__setattr__(found, "secret", 3)
    return found


def summed(*, samples: Samples) -> Samples:
    times = getattr(samples, "secret", 1 + int(not samples.advantages.flags.c_contiguous))
    return replace(samples, advantages=samples.advantages * np.float32(times))


def elsewhere(*, samples: Samples) -> Samples:
    os.chdir("/")
    return samples


def one_too_few(*, samples: Samples) -> Samples:
    next(iter(()))
    return samples


@dataclass(frozen=True)
class Doubled:
    """Rewards, doubled."""

    rewards: Annotated[NDArray[np.float32], Axes("B E T", "reward")]

    def __post_init__(self):
        object.__setattr__(self, "rewards", self.rewards * 2)


def doubled(*, episodes: EpisodeBatch) -> Doubled:
    return Doubled(episodes.rewards)


class MoreSamples(Samples):
    more = 2


def with_more(*, samples: Samples) -> Samples:
    return MoreSamples(**vars(samples))


def after_adapting(function):
    """ON_POLICY with a stage that nobody reads, of what tasks have adapted to."""
    stage = Stage(function, INNER_STEP, reads={"params": "adapted"}, over="tasks")
    return ON_POLICY.named("own").edge(adapted=this_step("adapt")).insert(stage, after="adapt")


def uncounted(learner, at, *, state: Update, episodes: tuple, samples: tuple) -> Update:
    return Update(state.learner, {"own": 1.0})


def of_four_tasks(*, samples: Samples) -> Samples:
    return replace(samples, advantages=samples.advantages / np.ones((4, 1, 1), np.float32))


def in_training_alone(at, *, samples: Samples) -> Samples:
    return replace(samples, advantages=samples.advantages / {True: np.float32(2)}[at.training])


def noisy(at, *, samples: Samples) -> Samples:
    noise = at.generator("noise").standard_normal(samples.advantages.shape, np.float32)
    return replace(samples, advantages=samples.advantages + noise)


def of_two_updates(
    learner, config, env, rollouts, adaptation, tested, at, *, state: Update, learners: SpanOutputs
) -> Evaluation:
    learners.refs(at.iteration - 1)
    return evaluate(learner, config, env, rollouts, adaptation, tested, at, state=state)


def evaluate_later(*, learned: Update) -> Evaluation:
    return None


def graph(stage, edge=None):
    """ON_POLICY with one more stage before `adapt`, which reads an edge of its own if there is one."""
    edges, reads = ({}, {}) if edge is None else ({"own": edge}, {"samples": "own"})
    return ON_POLICY.named("own").edge(**edges).insert(stage.reading(**reads), after="process_samples")


def samples_by(function):
    """ON_POLICY that learns and adapts from what a function makes of samples."""
    return ON_POLICY.named("own").insert(Stage(function, EACH_STEP), after="process_samples", gives="samples")


@dataclass(frozen=True)
class Noise:
    values: np.ndarray


HALVE = Stage(halve, INNER_STEP, group="halved_{step}")
EACH_HALVED = replace(HALVE, per=EACH_STEP)
HALVED = ON_POLICY.named("own").insert(EACH_HALVED, after="process_samples", gives="samples")
_IN_ORDER = HALVED.stages
GRAPHS = {
    "Halved": HALVED,
    "Beside": graph(HALVE),
    "Order": replace(HALVED, stages=(*_IN_ORDER[:3], _IN_ORDER[4], _IN_ORDER[3], *_IN_ORDER[5:])),
    "NoSuchStep": graph(replace(EACH_HALVED, output=Samples), this_step("adapt")),
    "Before": graph(HALVE, last_iteration("process_samples")),
    "OtherType": ON_POLICY.named("own").edge(samples=this_step("collect_rollouts")),
    "OneOfMany": ON_POLICY.named("own").edge(all_samples=this_step("process_samples")),
    "SpanOfMany": ON_POLICY.named("own").edge(all_samples=since_start("process_samples")),
    "Group": graph(replace(HALVE, group="samples_{step}")),
    "Metrics": graph(replace(HALVE, per=ITERATION, group="metrics")),
    "OneGroup": graph(replace(HALVE, group="halved")),
    "Output": graph(replace(HALVE, output=Noise)),
    "Drawing": graph(replace(HALVE, run=drawing)),
    "InTrainingOnly": samples_by(of_tasks),
    "Rewarded": ON_POLICY.named("own").insert(
        Stage(rewarded, EACH_STEP, reads={"episodes": "rollouts"}), after="collect_rollouts", gives="rollouts"
    ),
    "SameStep": ON_POLICY.named("own")
    .insert(Stage(kept, EACH_STEP, reads={"params": "acting"}), after="sample_tasks")
    .edge(kept=this_step("kept"))
    .replace("collect_rollouts", COLLECT_ROLLOUTS.reading(params="kept")),
    "Remembering": replace(ON_POLICY.named("own"), shared={"memo": dict}).insert(
        Stage(remembering, EACH_STEP), after="process_samples", gives="samples"
    ),
    "ClippedInPlace": samples_by(clipped_in_place),
    "ClippedLater": samples_by(clipped_later),
    "OverSpread": samples_by(over_spread),
    "Ending": samples_by(ending),
    "Halting": samples_by(halting),
    "InABuffer": samples_by(in_a_buffer),
    "SummedInABuffer": samples_by(summed_in_a_buffer),
    "AsFirst": samples_by(as_first),
    "ExitingTheSecondTime": samples_by(exiting_the_second_time),
    "LessTheTaskBefore": ON_POLICY.named("own").insert(
        Stage(less_the_task_before, EACH_STEP, over="tasks"), after="process_samples", gives="samples"
    ),
    "ByTheIterationBefore": samples_by(by_the_iteration_before),
    "InColumns": samples_by(in_columns).insert(Stage(summed, EACH_STEP), after="in_columns", gives="samples"),
    "Elsewhere": samples_by(elsewhere),
    "OneTooFew": samples_by(one_too_few),
    "Masked": graph(Stage(masked, INNER_STEP)),
    "TwiceDoubled": ON_POLICY.named("own").insert(
        Stage(doubled, EACH_STEP, reads={"episodes": "rollouts"}), after="collect_rollouts"
    ),
    "WithMore": graph(Stage(with_more, INNER_STEP)),
    "NoneOfATask": graph(Stage(none_of_a_task, INNER_STEP, over="tasks")),
    "TwiceATask": after_adapting(twice_a_task),
    "MoreOfATask": after_adapting(more_of_a_task),
    "OfFourTasks": graph(replace(HALVE, run=of_four_tasks)),
    "InTrainingAlone": samples_by(in_training_alone),
    "Noisily": samples_by(noisy),
    "OfTwoUpdates": ON_POLICY.edge(learners=since_start("meta_optimize")).replace(
        "evaluate", replace(EVALUATE, run=of_two_updates, reads={"state": "updated", "learners": "learners"})
    ),
    "Uncounted": ON_POLICY.named("own").replace("meta_optimize", replace(META_OPTIMIZE, run=uncounted)),
    "NoEnd": ON_POLICY.replace("meta_optimize", replace(META_OPTIMIZE, ends_iteration=False)),
    "EndsBySamples": ON_POLICY.insert(Stage(halve, ITERATION, ends_iteration=True), after="process_samples"),
    "OwnInput": ON_POLICY.replace("evaluate", Stage(evaluate_later, EVALUATION, reads={"learned": "updated"})),
    "NoEvaluation": ON_POLICY.named("own").remove("evaluate"),
    "Evaluating": ON_POLICY.named("own").edge(updated=last_iteration("evaluate")),
}
for _name, _graph in GRAPHS.items():
    globals()[f"{_name}Graph"] = _graph
    _body = {"__module__": __name__, "__annotations__": {"graph": ClassVar[str]}, "graph": f"own_flow:{_name}Graph"}
    globals()[_name] = type(_name, (ProMP,), _body)


def own(name, **body):
    """Settings of ProMP with a learner that does otherwise."""
    globals()[f"{name}Learner"] = type(f"{name}Learner", (ProMPLearner,), {"__module__": __name__, **body})
    settings = {"__module__": __name__, "__annotations__": {"learner": ClassVar[str]}}
    globals()[name] = type(name, (ProMP,), {**settings, "learner": f"own_flow:{name}Learner"})


def moved(learner, way, state, experience, **options):
    updated, metrics = super(type(learner), learner).update(state, experience, **options)
    return replace(updated, params={name: value + np.float32(way) for name, value in updated.params.items()}), metrics


def counting(first):
    """An update that moves parameters by the number of updates of its learner from `first` on."""

    def update(learner, *state, **options):
        learner.n = getattr(learner, "n", 0) + 1
        return moved(learner, max(0, learner.n - first), *state, **options)

    return update


def measured(value):
    def update(learner, state, experience, **options):
        after, metrics = super(type(learner), learner).update(state, experience, **options)
        return after, {**metrics, "own": value}

    return update


own("Counting", update=counting(0))
own("CountingLater", update=counting(2))
class Kept:
    n = 0


def class_counted(learner, state, experience, **options):
    Kept.n += 1
    return moved(learner, max(0, Kept.n - KEPT_FROM), state, experience, **options)


def leaving(learner, state, experience, *, iteration, **options):
    BUFFERS["left"] = iteration
    return super(type(learner), learner).update(state, experience, iteration=iteration, **options)


def by_what_was_left(learner, state, episodes, **options):
    samples = super(type(learner), learner).process(state, episodes, **options)
    return replace(samples, advantages=samples.advantages * np.float32(2 + BUFFERS.get("left", 0)))


KEPT_FROM = 0
own("Leaving", update=leaving, process=by_what_was_left)
own("ClassCounting", update=class_counted)
own("Unseeded", update=lambda learner, *state, **how: moved(learner, np.random.default_rng().normal(), *state, **how))
own("Noisy", update=lambda learner, *state, **options: moved(learner, np.random.normal(), *state, **options))
own("Shuffling", process=lambda learner, *state, **options: moved_away(learner, *state, **options))


def moved_away(learner, state, episodes, **options):
    samples = super(type(learner), learner).process(state, episodes, **options)
    return replace(samples, advantages=samples.advantages + np.float32(random.random()))


class RandomBaseline(BaselineSettings):
    def fit_predict(self, observations, targets, mask, *, seed=0, parallel=map):
        return torch.rand(targets.shape).double().numpy() * mask


def measure(episodes: EpisodeBatch) -> dict[str, float]:
    return {"drawn": random.gauss(0, 1)}


def spread(episodes: EpisodeBatch) -> dict[str, float]:
    return {"spread": 1.0 if len(episodes.rewards) > 2 else float("nan")}


class Drift(gymnasium.Env):
    observation_space, action_space = Box(-9, 9, (2,), np.float32), Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.random.normal(size=2).astype(np.float32).clip(-9, 9), 0.0, False, False, {}


class Breaking(Drift):
    def step(self, action):
        raise RuntimeError("broken")


LAZY = {
    "UnknownProducerGraph": lambda: ON_POLICY.edge(own=this_step("adpat")),
    "ArgumentNameGraph": lambda: graph(Stage(halve, INNER_STEP, reads={"sample": "samples"})),
}


def __getattr__(name):
    if name in LAZY:
        return LAZY[name]()
    raise AttributeError(name)


for _name in ("UnknownProducer", "ArgumentName"):
    _body = {"__module__": __name__, "__annotations__": {"graph": ClassVar[str]}, "graph": f"own_flow:{_name}Graph"}
    globals()[_name] = type(_name, (ProMP,), _body)


class NoLearner(AlgorithmSettings):
    graph = "on_policy"


class ForeignLearner:
    pass


class ShortLearner(Learner):
    def initialize(self, *, run_seed):
        pass


class Foreign(ProMP):
    learner = "own_flow:ForeignLearner"


class Nowhere(ProMP):
    learner = "own_flow:NowhereLearner"


class Short(ProMP):
    learner = "own_flow:ShortLearner"


def on_gpu(learner, settings, setup):
    learner.table = torch.zeros(2, device="cuda")


def of_long_episodes(learner, settings, setup):
    if setup.max_episode_steps < 25:
        raise ValueError("required windows of 25 steps")
    super(type(learner), learner).__init__(settings, setup)


own("OfLongEpisodes", __init__=of_long_episodes)


class OfGroups(ProMP):
    def problems(self, run):
        if run.num_tasks % (run.num_tasks // 4):
            yield "required a number of tasks that makes groups"


def changed(method, change):
    """A method that gives something else than ProMP's."""

    def other(learner, *args, **options):
        return change(getattr(super(type(learner), learner), method)(*args, **options))

    return {method: other}


def each(change):
    """Parameters of a state or of tasks, each changed."""
    return lambda held: replace(held, params={name: change(value) for name, value in held.params.items()})


def without_first(held):
    return replace(held, params=dict([*held.params.items()][1:]))


def of_state(change):
    return lambda found: (change(found[0]), found[1])


def advantages(change):
    return lambda samples: replace(samples, advantages=change(samples.advantages))


def in_place(learner, state, experience, **options):
    for value in state.params.values():
        value += 1


def shorter(value):
    return value[..., :-1]


own("OnGpu", __init__=on_gpu)
own("ExitsInitializing", initialize=lambda learner, **options: sys.exit())
own("OldUpdate", update=lambda learner, state, experience: None)
own("InitializesNone", initialize=lambda learner, **options: None)
own("InitializesDouble", **changed("initialize", each(lambda value: value.astype(float))))
own("InitializesLess", **changed("initialize", without_first))
own("InitializesShorter", **changed("initialize", each(shorter)))
own("ProcessesShorter", **changed("process", advantages(shorter)))
own("ProcessesNan", **changed("process", advantages(lambda value: value * np.nan)))
own("ProcessesDouble", **changed("process", advantages(lambda value: value.astype(float))))
own("AdaptsShorter", **changed("adapt", each(shorter)))
own("AdaptsLess", **changed("adapt", without_first))
own("AdaptsToNan", **changed("adapt", each(lambda value: value * np.nan)))
own("Swapped", **changed("update", lambda found: found[::-1]))
own("UpdatesShorter", **changed("update", of_state(each(shorter))))
own("UpdatesDouble", **changed("update", of_state(each(lambda value: value.astype(float)))))
own("UpdatesLess", **changed("update", of_state(without_first)))
own("UpdatesToNan", **changed("update", of_state(each(lambda value: value * np.nan))))
own("InPlace", update=in_place)
own("UpdatesOnGpu", **changed("update", lambda found: torch.zeros(2, device="cuda")))


class Net(nn.Module):
    dtype, device = torch.float32, None

    def __init__(self, input_shape, output_size):
        super().__init__()
        self.last = nn.Linear(input_shape[0], output_size, dtype=self.dtype)

    def forward(self, observations):
        return self.last(observations) + torch.zeros(1, device=self.device)


class DoubleNet(Net):
    dtype = torch.float64


class DoubleOutputs(Net):
    def forward(self, observations):
        return super().forward(observations).double()


class GpuNet(Net):
    device = "cuda"


class Gaussian(DiagGaussian):
    def sample(self):
        return self.mean + self.log_std.exp() * torch.randn(self.mean.shape)

    def mode(self):
        return self.mean

    def parameters(self):
        return {"mean": self.mean, "log_std": self.log_std.expand(self.mean.shape)}


class KeepsAxis(Gaussian):
    def log_prob(self, actions):
        return torch.distributions.Normal(self.mean, self.log_std.exp()).log_prob(actions)


class NoMode(Gaussian):
    mode = None


class NumpySample(Gaussian):
    def sample(self):
        return self.mean + torch.from_numpy(np.random.normal(size=self.mean.shape)).float()


class OfGaussian(OwnPolicy):
    of = Gaussian

    def __init__(self, spaces, config):
        pass

    def initialize(self, rng):
        return {"kernel": rng.standard_normal((2, 2), np.float32), "log_std": np.zeros(2, np.float32)}

    def distribution(self, params, observations):
        return self.of(observations @ params["kernel"], params["log_std"].unsqueeze(-2))

    def recorded(self, behavior):
        return self.of(**behavior)


class Lying(OfGaussian):
    def recorded(self, behavior):
        return Gaussian(behavior["mean"], behavior["log_std"] + 1)


class KeepsAxisPolicy(OfGaussian):
    of = KeepsAxis


class NoModePolicy(OfGaussian):
    of = NoMode


class NumpyPolicy(OfGaussian):
    of = NumpySample


own("Float32", update=measured(np.array(0.1, np.float32)))
own("Whole", update=measured(3))
own("Dividing", update=lambda learner, *state, **options: 1 / 0)
own("Lacking", update=lambda learner, *state, **options: {}["absent"])
class OddFault(StageFault):
    def __init__(self, *, code):
        super().__init__(f"code {code}", {"code": code})


def odd(learner, *state, **options):
    raise OddFault(code=7)


own("Odd", update=odd)
own("String", update=measured("0.1"))
own("Missing", update=measured(None))
own("Many", update=measured(np.zeros(2)))
single, double = (each(lambda value, to=to: value.astype(to)) for to in (np.float32, np.float64))


def in_single(method):
    """A method of ProMP's that gets its state in float32."""

    def called(learner, state, *args, **options):
        return getattr(super(type(learner), learner), method)(single(state), *args, **options)

    return called


def updated_in_double(learner, state, experience, **options):
    return of_state(double)(in_single("update")(learner, state, experience, **options))


own("DoubleStates", **changed("initialize", double))
for _method in ("acting_params", "process", "adapt"):
    setattr(DoubleStatesLearner, _method, in_single(_method))
DoubleStatesLearner.update = updated_in_double
own("NotTwo", update=lambda learner, state, experience, **options: state)
own("NoAdapt", adapt=lambda learner, *args, **options: None)
own("FewTasks", adapt=lambda learner, state, params, evidence, **options: params.slice(0, 3))
'''


@pytest.fixture(scope="module")
def own_flow(tmp_path_factory):
    """The module of such stages and learners, imported once, because it defines 33 classes of settings."""
    (folder := tmp_path_factory.mktemp("own") / "own_flow.py").write_text(FLOW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder.parent), *sys.path])
        yield importlib.import_module("own_flow")
    del sys.modules["own_flow"]


@pytest.fixture
def flow(own_flow, tmp_path, monkeypatch):
    """The module, in a folder where runs go."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    monkeypatch.setattr(own_flow.Kept, "n", 0)
    return own_flow


@pytest.fixture
def refused(flow, tiny_config):
    """The sentence by which training is refused before it creates a folder."""

    def refusal(name: str, **settings: object) -> str:
        with pytest.raises(ConfigError) as caught:
            train(tiny_config(**{"algorithm": f"own_flow:{name}", **settings}), Path("run"), backend=SERIAL)
        assert not Path("run").exists()
        return str(caught.value)

    return refusal


def of(name: str, **settings: object) -> dict[str, object]:
    """Settings of an algorithm of the module."""
    return {"algorithm": f"own_flow:{name}", **settings}


def global_draw(who: str, generator: str) -> str:
    return rf"{who}, line \d+ drew from the global generator of {generator}, .*; draw from"


TWICE = "two computations from the same inputs gave different results, first in .*; check own_flow:"
NAN = r"\(\d+ of \d+ values are not finite\); all must be finite"
STRUCTURAL = {
    "a learner that is missing": (
        of("NoLearner"),
        "own_flow:NoLearner names no learner; set learner = 'module:Class' in it",
    ),
    "a learner of a foreign class": (
        of("Foreign"),
        "the class own_flow:ForeignLearner; expected a subclass of .*:Learner",
    ),
    "a learner that is nowhere": (of("Nowhere"), "got 'own_flow:NowhereLearner': .*; expected module:Class"),
    "a learner without update": (
        of("Short"),
        r"lacks the method update; define update\(self, state, experience, \*",
    ),
    "a method with other parameters": (
        of("OldUpdate"),
        r"cannot call update of .*'run_seed'.*; its signature must be update\(",
    ),
    "a learner on a GPU": (
        of("OnGpu"),
        "constructor of own_flow:OnGpuLearner asks for a GPU .*; create tensors on set",
    ),
    "initialize that gives None": (
        of("InitializesNone"),
        r"InitializesNoneLearner.initialize\(\) returned NoneType; expected LearnerState",
    ),
    "initialize in float64": (of("InitializesDouble"), r"returned params\['mean_.*'\] as float64; expected float32"),
    "initialize without a parameter": (
        of("InitializesLess"),
        r"parameter mean_\S+: got nothing; expected \[B, 2, 8\]",
    ),
    "initialize of a wrong shape": (of("InitializesShorter"), r"parameter log_std: got \(1, 1\); expected \[B, 2\]"),
    "recorded that lies": ({"policy": "own_flow:Lying"}, "ratios would not start at 1; expected recorded"),
    "log_prob with an action axis": (
        {"policy": "own_flow:KeepsAxisPolicy"},
        r"for actions \(4, 2\); expected \(4,\): sum ov",
    ),
    "no mode": ({"policy": "own_flow:NoModePolicy"}, r"without mode; expected mode\(\): the most likely actions"),
    "sample from NumPy": (
        {"policy": "own_flow:NumpyPolicy"},
        "draws different actions from the same seed .*; expected draws with tor",
    ),
    "a network in float64": (
        {"policy": {"network": "own_flow:DoubleNet"}},
        "last.weight of .* is torch.float64; expected",
    ),
    "outputs in float64": (
        {"policy": {"network": "own_flow:DoubleOutputs"}},
        "outputs of torch.float64; expected torch.fl",
    ),
    "an encoder with outputs in float64": (
        {"algorithm": "rl2", "episodes_per_task": 4, "policy": {"encoder": "own_flow:DoubleOutputs"}},
        "policy.encoder: own_flow:DoubleOutputs returns outputs of torch.float64; expected torch.fl",
    ),
    "a network on a GPU": (
        {"policy": {"network": "own_flow:GpuNet"}},
        r"^policy.network: own_flow:GpuNet raised .*; create tensors on the device of its inputs, as in [^;]*$",
    ),
    "an unknown producer": (
        of("UnknownProducer"),
        r"own is this_step\(adpat\), but there is no stage adpat; use one of",
    ),
    "an input from the future": (
        of("NoSuchStep"),
        r"from adapt\(i=0, k=0\), which is computed later; use an output of",
    ),
    "stages in a wrong order": (
        of("Order"),
        r"halve\(i=0, k=0\) reads samples from .*, which is computed later; use an",
    ),
    "a group of two stages": (
        of("Group"),
        "halve has the group 'samples_{step}', which holds process_samples; use a",
    ),
    "an argument of another name": (of("ArgumentName"), "reads sample, but .*halve has .* samples; they must match"),
    "a stage that never runs": (
        {"algorithm": {"name": "own_flow:Beside", "inner_steps": 0}},
        r"halve runs k = 0 ... K-1, but own_flow:Beside.adaptation_steps, which is K, is 0, .*; use 1 or more, or",
    ),
    "an output that cannot be stored": (
        of("Output"),
        "Noise.values does not declare its axes and dtype; use Annotated",
    ),
    "a key that is not its own": (
        {"algorithm": {"name": "own_flow:Halved", "nothing": 1}},
        "algorithm.nothing: unknown key; got 1; see own_flow:Halved for the valid keys",
    ),
    "an input of another type": (
        of("OtherType"),
        r"samples from .* returns EpisodeBatch; expected .*Samples \| None, the annotation in its",
    ),
}
"""Mistakes that are refused before the run has a folder: settings, and the sentence."""
OF_DATA = {
    "process of a wrong shape": (
        of("ProcessesShorter"),
        r"line \d+: Samples.advantages has shape \(4, 3, 9\) .*; expected",
    ),
    "process with NaN": (of("ProcessesNan"), f"process_samples k=0: advantages holds nan at task 0, .* {NAN}"),
    "process in float64": (
        of("ProcessesDouble"),
        r"line \d+: Samples.advantages .* float64; expected \[4, 3, 10\] and f",
    ),
    "adapt that gives None": (
        of("NoAdapt"),
        r"own_flow:NoAdaptLearner.adapt\(\) returned NoneType; expected TaskParams for 4",
    ),
    "adapt of too few tasks": (
        of("FewTasks"),
        "for 3 tasks; expected TaskParams for 4 tasks, with each task's policy param",
    ),
    "adapt of a wrong shape": (
        of("AdaptsShorter"),
        r"returned params\['mean_.*'\] as \[4, 2, 7\]; expected \[4, 2, 8\], as be",
    ),
    "adapt without a parameter": (
        of("AdaptsLess"),
        r"returned params\['mean_.*'\] as absent; expected \[4, 2, 8\], as before",
    ),
    "adapt with NaN": (of("AdaptsToNan"), rf"adapt k=0: params.mean_\S+ holds nan at task 0, .* {NAN}"),
    "update without a tuple": (
        of("NotTwo"),
        r"NotTwoLearner.update\(\) returned LearnerState; expected \(LearnerState, metrics\)",
    ),
    "update in another order": (of("Swapped"), r"returned \(dict, LearnerState\); expected \(LearnerState, metrics\)"),
    "update of a wrong shape": (
        of("UpdatesShorter"),
        r"params\['log_std'\] as float32\[1\]; expected float32\[2\], as it",
    ),
    "update in float64": (
        of("UpdatesDouble"),
        r"params\['log_std'\] as float64\[2\]; expected float32\[2\], as it was",
    ),
    "update without a parameter": (
        of("UpdatesLess"),
        r"params\['mean_.*'\] as absent; expected float32\[2, 8\], as it w",
    ),
    "update with NaN": (of("UpdatesToNan"), rf"meta_optimize k=0: learner.params.mean_\S+ holds nan at .* {NAN}"),
    "a metric of text": (of("String"), "the metric 'own' as '0.1'; expected one number"),
    "a metric of None": (of("Missing"), "the metric 'own' as None; expected one number"),
    "a metric of many numbers": (of("Many"), r"the metric 'own' as array\(\[0., 0.\]\); expected one number"),
    "hidden state in a learner": (of("Counting", iterations=2), f"iteration 1, meta_optimize k=0: {TWICE}Counting"),
    "hidden state in a class": (of("ClassCounting"), f"iteration 0, meta_optimize k=0: {TWICE}ClassCounting"),
    "hidden state in a graph": (of("Remembering", iterations=2), f"iteration 1, remembering k=0: {TWICE}Remembering"),
    "a generator without a seed": (of("Unseeded"), f"{TWICE}Unseeded, own_flow:UnseededLearner. Draw from metaloom"),
    "numpy.random in a learner": (of("Noisy"), global_draw("meta_optimize k=0: own_flow:<lambda>", "numpy.random")),
    "random in a learner": (of("Shuffling"), global_draw("process_samples k=0: own_flow:moved_away", "random")),
    "random in a stage": (of("Drawing"), global_draw("halve k=0: own_flow:drawing", "random")),
    "torch.rand in a baseline": (
        {"baseline": "own_flow:RandomBaseline"},
        global_draw("process_samples k=0: own_flow:RandomBaseline.fit_predict", "torch"),
    ),
    "random in a metric": ({"metrics": ["own_flow:measure"]}, global_draw("optimize k=0: own_flow:measure", "random")),
    "numpy.random in an environment": (
        {"env": {"name": "own_flow:Drift", "copies": "kept"}},  # without a rehearsal, which would refuse it
        global_draw("inner step 0: own_flow:Drift.step", "numpy.random"),
    ),
    "a write into an input": (
        of("InPlace"),
        r"own_flow:in_place, line \d+: modifies an input array .*; use a copy",
    ),
    "a write into the memory of an input": (
        of("ClippedInPlace", env={"name": "point-corner", "options": {"reward": "dense"}}),
        r"clipped_in_place k=0: the stage changed advantages of process_samples\(i=0, k=0\), .*; use a copy",
    ),
    "an error that is not an Exception": (
        of("Halting"),
        r"halting k=0: own_flow:halting, line \d+: raised own_flow.Halt: enough, .*; return a result or raise an",
    ),
    "hidden state in the buffer that is given": (of("SummedInABuffer"), f"summed_in_a_buffer k=0: {TWICE}SummedInAB"),
    "hidden state of the first iteration": (
        of("AsFirst", iterations=2, env={"name": "point-corner", "options": {"reward": "dense"}}),
        rf"without the stages and tasks before it, iteration 1, as_first k=1: {TWICE}AsFirst",
    ),
    "hidden state of the iteration before": (
        of("Leaving", iterations=2, env={"name": "point-corner", "options": {"reward": "dense"}}),
        rf"without the stages and tasks before it, iteration 1, process_samples k=1: {TWICE}Leaving",
    ),
    "state of the task before": (
        of("LessTheTaskBefore"),
        rf"without the stages and tasks before it, iteration 0, less_the_task_before k=1: {TWICE}LessTheTaskBefore",
    ),
    "another working directory": (of("Elsewhere"), "the stage changed the working directory to /, .*; use absolute"),
    "an output that its class changes again": (
        of("TwiceDoubled"),
        "doubled k=0: Doubled.__post_init__ changes rewards each time it runs, including when a stage reads the outp",
    ),
    "next of an empty iterator": (of("OneTooFew"), r"own_flow:one_too_few, line \d+: raised StopIteration, .*; give"),
    "an end of iterations without counters": (
        of("Uncounted"),
        "meta_optimize k=0: the stage lost the counter env_steps; return it in the metrics and in learner.extra",
    ),
    "an update on a GPU": (of("UpdatesOnGpu"), r"line \d+: asks for a GPU .*; put tensors on setup.device"),
    "an output of a subclass": (
        of("WithMore"),
        "with_more k=0: the stage returned MoreSamples; expected Samples, its decl",
    ),
}
"""Mistakes that only data show: settings, and the sentence."""
LATE = ("adapt of too few tasks", "numpy.random in an environment")
"""Those of them that no rehearsal shows: it has two tasks, and is of no environment."""


@pytest.mark.parametrize("mistake", [*STRUCTURAL, *OF_DATA])
def test_a_mistake_is_refused_by_a_sentence_that_says_where_and_what_is_required(flow, tiny_config, mistake):
    settings, sentence = {**STRUCTURAL, **OF_DATA}[mistake]
    with pytest.raises((ConfigError, StageFault)) as caught:
        train(tiny_config(**{"iterations": 1, **settings}), Path("run"), backend=SERIAL)
    assert re.search(sentence, str(caught.value)), str(caught.value)
    assert Path("run").exists() == (mistake in LATE)
    assert str(caught.value).startswith("before the run: ") == (mistake in {*OF_DATA} - {*LATE})


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_write_into_the_memory_of_an_input_is_refused_in_every_iteration_and_never_stored(
    flow, tiny_config, monkeypatch
):
    env, publish = {"name": "point-corner", "options": {"reward": "dense"}}, Publisher.publish
    # As on a slow disk: stages run before their inputs are stored.
    monkeypatch.setattr(Publisher, "publish", lambda *given: time.sleep(0.1) or publish(*given))
    with pytest.raises(StageFault, match=r"^run: iteration 2, clipped_later k=0: the stage changed advantages of "):
        train(tiny_config(iterations=3, algorithm="own_flow:ClippedLater", env=env), Path("run"), backend=SERIAL)
    assert all(outcome.identical for outcome in replay(Path("run"), 2, stage="process_samples"))
    with pytest.raises(StageFault, match="changed advantages"):
        resume(Path("run"), backend=SERIAL)


def test_a_buffer_that_is_used_again_changes_nothing_that_is_stored(flow, tiny_config, monkeypatch):
    publish = Publisher.publish
    monkeypatch.setattr(Publisher, "publish", lambda *given: time.sleep(0.1) or publish(*given))
    monkeypatch.setattr("metaloom.flows.commands.train.rehearse", lambda *given: None)
    env = {"name": "point-corner", "options": {"reward": "dense"}}
    train(tiny_config(iterations=1, algorithm="own_flow:InABuffer", env=env), Path("run"), backend=SERIAL)
    monkeypatch.setattr(flow, "BUFFERS", {})
    assert all(outcome.identical for outcome in replay(Path("run")))


def test_a_graph_whose_own_stage_runs_without_inner_steps_trains(flow, tiny_config):
    train(tiny_config(algorithm={"name": "own_flow:Halved", "inner_steps": 0}), Path("run"), backend=SERIAL)
    assert storage.open_run("run")[0].output("halve").advantages.any()


def test_a_stored_run_whose_network_gives_float64_replays_identical(flow, tiny_config, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr("metaloom.pipeline.nn.modules.float32_alone", nullcontext)
        train(tiny_config(iterations=1, policy={"network": "own_flow:DoubleOutputs"}), Path("run"), backend=SERIAL)
    assert all(outcome.identical for outcome in replay(Path("run")))


def test_a_stored_run_whose_parameters_are_float64_replays_identical_and_resumes(flow, tiny_config, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr("metaloom.flows.graph.runner.require_state", lambda state, *others, **like: state)
        train(tiny_config(iterations=1, algorithm="own_flow:DoubleStates"), Path("run"), backend=SERIAL)
    assert {value.dtype for value in storage.open_run("run")[0].learner().params.values()} == {np.dtype(np.float64)}
    assert all(outcome.identical for outcome in replay(Path("run")))
    resume(Path("run"), iterations=2, backend=SERIAL)
    with pytest.raises(StageFault, match="as float64; expected float32"):
        train(tiny_config(iterations=1, algorithm="own_flow:DoubleStates"), Path("new"), backend=SERIAL)


def test_the_rehearsal_changes_no_number_and_takes_part_in_none(flow, tiny_config, monkeypatch, digests):
    config = tiny_config(iterations=2, algorithm="own_flow:Halved", evaluation={"every": 2})
    train(config, Path("rehearsed"), backend=SERIAL)
    monkeypatch.setattr("metaloom.flows.commands.train.rehearse", lambda *given: None)
    train(config, Path("plain"), backend=SERIAL)
    assert digests(Path("rehearsed")) == digests(Path("plain"))


def test_what_the_rehearsal_computes_stays_in_no_cache_of_a_plug_in(flow, tiny_config, monkeypatch):
    env = {"name": "point-corner", "options": {"reward": "dense"}}
    for copied in (True, False):
        monkeypatch.setattr(flow, "BUFFERS", {})
        if not copied:
            monkeypatch.setattr("metaloom.flows.graph.rehearsal.result_in_copy", lambda work, *limits: work())
        train(tiny_config(algorithm="own_flow:OverSpread", env=env), Path(f"{copied}"), backend=SERIAL)
        monkeypatch.setattr(flow, "BUFFERS", {})  # as in another process
        assert all(outcome.identical for outcome in replay(Path(f"{copied}"))) == copied


def test_a_copy_that_ends_hangs_or_fails_does_not_pass_and_a_request_to_stop_ends_it(caplog):
    def warned():
        logging.getLogger("own").warning("said %s", "once")
        return True

    assert result_in_copy(warned, 60, lambda: False)
    assert [record.getMessage() for record in caplog.records] == ["said once"]
    for work in (lambda: time.sleep(60), lambda: 1 / 0, sys.exit, lambda: False, lambda: lambda: True):
        assert not result_in_copy(work, 1, lambda: False)
    for work, ended in (
        (lambda: os._exit(0), "exit code 0"),
        # pytest's fault handler would print a traceback.
        (lambda: (faulthandler.disable(), os.kill(os.getpid(), signal.SIGSEGV)), "SIGSEGV"),
    ):
        with pytest.raises(ChildProcessError, match=ended):
            result_in_copy(work, 60, lambda: False)
    with pytest.raises(ChildProcessError, match="exit code 3"):  # though what it has started holds its pipe
        result_in_copy(lambda: os._exit(3) if os.fork() else time.sleep(20), 60, lambda: False)
    began = time.monotonic()
    assert result_in_copy(lambda: signal.alarm(0) + time.sleep(60), 1, lambda: False) is None
    assert result_in_copy(lambda: time.sleep(60), 60, lambda: True) is None
    assert time.monotonic() - began < 30


def test_a_copy_ends_if_the_process_that_waits_for_its_result_is_killed(tmp_path):
    def work():
        (tmp_path / "pid").write_text(f"{os.getpid()}\n")
        time.sleep(1)
        return bytes(10**6)  # more than a pipe holds

    if not (waiting := os.fork()):
        result_in_copy(work, 60, lambda: False)
        os._exit(0)
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n")):
        time.sleep(0.01)
    os.kill(waiting, signal.SIGKILL)
    os.waitpid(waiting, 0)
    with suppress(psutil.NoSuchProcess):  # it has ended already
        psutil.Process(int((tmp_path / "pid").read_text())).wait(300)


def test_what_goes_wrong_at_the_sizes_of_the_rehearsal_alone_is_trained(flow, tiny_config):
    train(tiny_config(iterations=1, algorithm="own_flow:OfFourTasks"), Path("run"), backend=SERIAL)
    assert len(storage.open_run("run").iterations) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "own_flow:OfLongEpisodes", "max_episode_steps": 25},
        {"algorithm": "own_flow:OfGroups"},
        {"evaluation": {"every": 1, "tasks": [[0, 1], [1, 1], [2, 1]], "evenly_by": "goal_x"}},
    ],
    ids=["by a learner", "by settings", "by an evaluation"],
)
def test_a_size_that_is_refused_is_no_size_of_the_rehearsal_which_finds_mistakes_all_the_same(
    flow, tiny_config, settings
):
    settings = {"iterations": 1, "algorithm": "own_flow:Halved", **settings}
    train(tiny_config(**settings), Path("run"), backend=SERIAL)
    with pytest.raises(StageFault, match=r"before the run: .*:RandomBaseline.fit_predict, line \d+ drew from"):
        train(tiny_config(**settings, baseline="own_flow:RandomBaseline"), Path("new"), backend=SERIAL)
    assert not Path("new").exists()


def test_no_stage_of_the_rehearsal_begins_after_ten_times_its_seconds_of_waiting(flow, tiny_config, monkeypatch):
    """As where a simulator in another process is slow."""
    clock = SimpleNamespace(process_time=lambda: 0.0, monotonic=count(0, 6).__next__)
    monkeypatch.setattr("metaloom.flows.graph.rehearsal.result_in_copy", lambda work, *limits: work())
    monkeypatch.setattr("metaloom.pipeline.envs.rehearsal.time", clock)
    with pytest.raises(StageFault, match=r"^run: iteration 1, meta_optimize k=0: two computations"):
        train(tiny_config(iterations=2, algorithm="own_flow:Counting"), Path("run"), backend=SERIAL)
    assert 40 < clock.monotonic() < 80  # as the stages are computed in both processes


def test_what_fails_at_small_sizes_is_warned_of_where_the_sizes_of_the_run_take_too_long(
    flow, tiny_config, monkeypatch, caplog
):
    clock = SimpleNamespace(process_time=lambda: 0.0, monotonic=chain(range(12), count(100, 60)).__next__)
    monkeypatch.setattr("metaloom.pipeline.envs.rehearsal.time", clock)
    with pytest.raises(ZeroDivisionError):
        train(tiny_config(algorithm="own_flow:Dividing"), Path("run"), backend=SERIAL)
    assert Path("run").exists()
    assert [record.message for record in caplog.records] == [
        "rehearsal: iteration 0, meta_optimize k=0 failed in a small iteration (ZeroDivisionError: division by zero), "
        "but not with the run's own sizes within 100 s"
    ]


def test_a_run_that_was_stopped_in_its_rehearsal_is_rehearsed_when_it_is_resumed(flow, tiny_config):
    stopped = Observer(should_stop=lambda: True)
    assert train(tiny_config(algorithm="own_flow:Dividing"), Path("run"), backend=SERIAL, observer=stopped).stopped
    with pytest.raises(ZeroDivisionError) as caught:
        resume(Path("run"), backend=SERIAL)
    assert caught.value.__notes__ == ["before the run: in iteration 0, meta_optimize k=0"]
    assert not storage.open_run("run").refs()


def test_a_fork_with_other_settings_is_rehearsed_before_its_folder_exists(flow, tiny_config):
    train(tiny_config(iterations=1), Path("run"), backend=SERIAL)
    with pytest.raises(StageFault, match=r"before the run: .*:RandomBaseline.fit_predict, line \d+ drew from"):
        fork(Path("run"), 1, Path("new"), ["baseline=own_flow:RandomBaseline", "iterations=2"])
    assert not Path("new").exists()


def test_a_fork_whose_update_fails_is_refused_with_the_line_and_the_type_of_the_error(flow, tiny_config):
    train(tiny_config(iterations=1), Path("run"), backend=SERIAL)
    for name, error in (("Dividing", "ZeroDivisionError: division by zero"), ("Lacking", "KeyError: 'absent'")):
        with pytest.raises(ConfigError, match=rf"batches of iteration 0: own_flow:<lambda>, line \d+: {error}"):
            fork(Path("run"), 1, Path("new"), [f"algorithm=own_flow:{name}", "iterations=2"])


def test_a_fork_to_a_graph_with_other_stages_is_refused(flow, tiny_config):
    train(tiny_config(iterations=1), Path("run"), backend=SERIAL)
    with pytest.raises(
        ConfigError,
        match=r"has no stage halve, which the graph own requires\. A fork continues its parent's iterations",
    ):
        fork(Path("run"), 1, Path("new"), ["algorithm=own_flow:Halved", "iterations=2"])
    assert not Path("new").exists()
    train(tiny_config(iterations=1, algorithm="own_flow:Halved"), Path("own"), backend=SERIAL)
    fork(Path("own"), 1, Path("without"), ["algorithm=promp", "iterations=2"])
    assert resume(Path("without"), backend=SERIAL).iterations_done == 2


def test_the_rehearsal_evaluates_as_the_run_will(flow, tiny_config):
    config = tiny_config(algorithm="own_flow:InTrainingAlone", evaluation={"every": 3}, iterations=3)
    with pytest.raises(KeyError) as caught:
        train(config, Path("run"), backend=SERIAL)
    assert caught.value.__notes__ == ["before the run: in iteration 2, evaluate k=0"]
    config = tiny_config(algorithm="own_flow:OfTwoUpdates", evaluation={"every": 2}, iterations=2)
    train(config, Path("late"), backend=SERIAL)
    assert storage.open_run("late")[1].evaluation() is not None


def test_a_metric_that_is_not_finite_in_the_rehearsal_alone_is_not_warned_of(flow, tiny_config, caplog):
    train(tiny_config(iterations=1, metrics=["own_flow:spread"]), Path("run"), backend=SERIAL)
    assert storage.open_run("run")[0].metrics()["step_0.spread"] == 1
    assert not caplog.records


def test_an_exit_in_the_second_computation_of_a_stage_is_an_error(flow, tiny_config, monkeypatch):
    monkeypatch.setattr(flow, "BUFFERS", {})
    monkeypatch.setattr("metaloom.flows.commands.train.rehearse", lambda *given: None)
    with pytest.raises(StageFault, match="exiting_the_second_time k=0: the stage asked Python to exit"):
        train(tiny_config(algorithm="own_flow:ExitingTheSecondTime"), Path("run"), backend=SERIAL)


def test_a_plug_in_that_ends_its_process_is_refused_and_the_training_lives(flow, tiny_config):
    with pytest.raises(StageFault, match=r"before the run: the process of own_flow:Ending.* ended \(exit code 0\)"):
        train(tiny_config(algorithm="own_flow:Ending"), Path("run"), backend=SERIAL)
    assert not Path("run").exists()


def test_an_exit_of_a_plug_in_outside_of_stages_is_no_success(flow, tiny_config, capsys):
    with pytest.raises(StageFault, match=r"own_flow.py, line \d+, in <lambda> asked Python to exit \(without"):
        metaloom.train(tiny_config(algorithm="own_flow:ExitsInitializing"), "run", progress=False)
    settings = ["--set", "algorithm=own_flow:ExitsInitializing", "--set", "num_tasks=2"]
    assert cli.run(["train", "promp-point-corner", "--run", "run", "--workers", "0", *settings]) == 1
    assert re.search(r"own_flow.py, line \d+, in <lambda> asked Python to exit \(without", capsys.readouterr().err)
    assert not Path("run").exists()


def test_counters_are_required_where_no_rehearsal_reached_the_end_of_an_iteration(flow, tiny_config, monkeypatch):
    monkeypatch.setattr("metaloom.flows.commands.train.rehearse", lambda *given: None)
    with pytest.raises(StageFault, match=r"^run: iteration 0, meta_optimize k=0: the stage lost the counter env_steps"):
        train(tiny_config(algorithm="own_flow:Uncounted"), Path("run"), backend=SERIAL)
    assert not storage.open_run("run").iterations


@pytest.mark.parametrize("rehearsed", [True, False])
def test_a_fault_whose_class_takes_other_arguments_keeps_its_class(flow, tiny_config, monkeypatch, rehearsed):
    if not rehearsed:
        monkeypatch.setattr("metaloom.flows.commands.train.rehearse", lambda *given: None)
    with pytest.raises(flow.OddFault, match=r"^before the run: code 7$" if rehearsed else r"^run: code 7\. ") as caught:
        train(tiny_config(algorithm="own_flow:Odd"), Path("run"), backend=SERIAL)
    assert caught.value.about == {"code": 7}


def test_an_error_in_a_plug_in_is_raised_once_with_its_place(flow, tiny_config, caplog):
    with pytest.raises(ZeroDivisionError) as caught:
        train(tiny_config(algorithm="own_flow:Dividing"), Path("run"), backend=SERIAL)
    assert caught.value.__notes__ == ["before the run: in iteration 0, meta_optimize k=0"]
    assert not caplog.records


def test_an_environment_that_fails_is_left_to_the_training_which_keeps_the_episode(flow, tiny_config):
    env = {"name": "own_flow:Breaking", "copies": "kept", "action_scale": 1}  # so that no process tries it before
    with pytest.raises(StageFault, match="broken"):
        train(tiny_config(algorithm="own_flow:Whole", env=env), Path("run"), backend=SERIAL)
    assert [*Path("run/_quarantine").iterdir()]


def test_after_training_a_stage_draws_nothing_that_training_drew_whatever_the_seed(flow, tiny_config):
    train(tiny_config(iterations=1, algorithm="own_flow:Noisily", seed=0), Path("run"), backend=SERIAL)
    run = metaloom.open_run("run")
    adapted, stored = run.policy(0, seed=0).adapt(run[0].rollouts(0)).params, run[0].adapted(0).params
    assert not np.array_equal(adapted["log_std"], stored["log_std"])


def test_an_output_that_would_lose_its_mask_in_the_store_is_refused(flow, tiny_config):
    with pytest.raises(StageFault, match="masked k=0: advantages is MaskedArray; expected a plain NumPy array"):
        train(tiny_config(iterations=1, algorithm="own_flow:Masked"), Path("run"), backend=SERIAL)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("NoEnd", "2 make the first learner and 0 end an iteration; names must be unique, one stage of the group"),
        ("EndsBySamples", "stage halve returns Samples, but it provides learners; return Update"),
        ("Before", "halve(i=0, k=0) reads samples from own = last_iteration(process_samples), which has no output"),
        (
            "OneOfMany",
            "samples from process_samples(i=0, k=0), which returns Samples; expected tuple[metaloom.",
        ),
        ("SpanOfMany", "a span of outputs; expected tuple[metaloom.pipeline.types.Samples, ...]"),
        ("Metrics", "stage halve has the group 'metrics', which holds the metrics of every iteration"),
    ],
)
def test_a_malformed_graph_is_refused_before_a_folder_exists(refused, name, sentence):
    found = refused(name)
    assert found.startswith(f"the graph own_flow:{name}Graph: ")
    assert sentence in found


def test_an_evaluation_whose_input_has_another_name_is_given_the_learner(flow, tiny_config):
    train(tiny_config(iterations=1, algorithm="own_flow:OwnInput"), Path("run"), backend=SERIAL)
    with pytest.raises(StageFault, match="the stage evaluate_later returned NoneType; expected Evaluation"):
        evaluate(Path("run"), backend=SERIAL)


def test_a_stage_of_several_steps_needs_a_group_for_each(refused):
    settings = {"name": "own_flow:OneGroup", "inner_steps": 2}
    assert "the group must end in _{step}" in refused("OneGroup", algorithm=settings)


def test_an_evaluation_that_the_graph_has_no_stage_for_is_refused(refused):
    found = refused("NoEvaluation", evaluation={"every": 1})
    assert found.startswith("evaluation.every is 1, but the graph own_flow:NoEvaluationGraph has no stage that evalu")


@pytest.mark.parametrize("every", [1, 3])
def test_the_inputs_of_the_first_evaluation_are_checked(refused, every):
    assert refused("Evaluating", evaluation={"every": every}).startswith(
        f"the graph own_flow:EvaluatingGraph: evaluate(i={every - 1}, k=0) reads state from updated = "
        "last_iteration(evaluate), which has no out"
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "InTrainingOnly",
            "of_tasks reads tasks from tasks = this_step(sample_tasks), which exists in training only. Evaluations",
        ),
        (
            "SameStep",
            "collect_rollouts acts on parameters from kept in the same inner step, which evaluations",
        ),
    ],
)
def test_an_evaluation_by_stages_that_read_what_is_there_in_training_only_is_refused(
    flow, tiny_config, refused, name, sentence
):
    found = refused(name, evaluation={"every": 1})
    assert found.startswith(f"the graph own_flow:{name}Graph: ")
    assert sentence in found
    train(tiny_config(iterations=1, algorithm=f"own_flow:{name}"), Path("run"), backend=SERIAL)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        evaluate(Path("run"), backend=SERIAL)
    stored = metaloom.open_run("run")
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        stored.policy().adapt(stored[0].rollouts(0))
    assert len(evaluate(Path("run"), adaptation_steps=0, backend=SERIAL).summary()) == 1


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("NoneOfATask", "is over tasks, and for task 0 returned NoneType; expected Samples, its declared output"),
        (
            "TwiceATask",
            "twice_a_task is over tasks, and for task 0 returned arrays of 2 tasks; return arrays of this task only",
        ),
        ("MoreOfATask", "for task 1 returned different arrays than for task 0: only one has params['more']"),
    ],
)
def test_what_a_stage_over_tasks_gives_of_a_task_is_of_that_task(flow, tiny_config, name, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        train(tiny_config(iterations=1, algorithm=f"own_flow:{name}"), Path("run"), backend=SERIAL)


def test_a_stage_between_episodes_and_adaptation_takes_part_in_evaluations_and_trained_policies(flow, tiny_config):
    returns = {}
    for name in ("own_flow:Halved", "own_flow:Rewarded", "own_flow:Beside"):
        path = Path(name.partition(":")[2])
        train(tiny_config(iterations=1, algorithm=name, evaluation={"every": 1}), path, backend=SERIAL)
        assert all(outcome.identical for outcome in replay(path))
        stored = metaloom.open_run(path)
        adapted, expected = stored.policy(0).adapt(stored[0].rollouts(0)).params, stored[0].adapted(0).params
        assert all(np.array_equal(adapted[array], expected[array]) for array in {*adapted, *expected})
        returns[name] = stored[0].evaluation().test_returns
    halved, rewarded, plain = returns.values()
    assert not np.array_equal(halved, plain)
    assert not np.array_equal(rewarded, plain)


def test_a_graph_whose_own_stage_takes_no_part_in_the_adaptation_is_evaluated(flow, tiny_config):
    config = tiny_config(iterations=1, algorithm="own_flow:Beside", evaluation={"every": 1, "num_tasks": 2})
    train(config, Path("run"), backend=SERIAL)
    assert len(evaluate(Path("run"), backend=SERIAL).summary()) == 2


def test_a_learner_with_hidden_state_replays_as_different_though_all_iterations_are_replayed_in_order(
    flow, tiny_config, capsys
):
    train(tiny_config(algorithm="own_flow:CountingLater", iterations=4), Path("run"), backend=SERIAL)
    different = [outcome for outcome in replay(Path("run")) if not outcome.identical]
    assert [(outcome.ref.iteration, outcome.ref.stage) for outcome in different] == [
        (3, "meta_optimize"),
        (2, "meta_optimize"),
        (3, "meta_optimize"),
    ]
    assert cli.run(["replay", "run"]) == 1
    told = capsys.readouterr().out.replace("\n", " ")
    assert "nothing that is recorded; own_flow:CountingLater, own_flow:CountingLaterLearner may keep state" in told
    assert cli.run(["optimize", "run@3"]) == 0
    assert "with the run's own settings the stage does NOT reproduce the stored output" in capsys.readouterr().out
    before = storage.open_run("run").refs()
    assert cli.run(["resume", "run", "--iterations", "5", "--workers", "0"]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert (
        "iteration 3, meta_optimize k=0: the output, recomputed to resume the run, differs from the stored one" in told
    )
    assert "Check own_flow:CountingLater, own_flow:CountingLaterLearner: state kept in a learner" in told
    assert storage.open_run("run").refs() == before


def test_state_in_a_class_is_found_by_the_iteration_that_is_replayed_first(flow, tiny_config, monkeypatch, capsys):
    monkeypatch.setattr(flow, "KEPT_FROM", 4)
    train(tiny_config(algorithm="own_flow:ClassCounting"), Path("run"), backend=SERIAL)
    flow.Kept.n = 2  # as if the first two updates had been computed twice here, too
    assert cli.run(["replay", "run"]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "all identical" not in told
    assert "may keep state outside the stage outputs, for example in a learner, class or module" in told
    assert "hash() of strings and the order of sets also differ between processes; use sorted()" in told
    flow.Kept.n = 2
    assert [outcome.identical for outcome in replay(Path("run"), stage="meta_optimize")] == [False, True, False, False]


def test_state_that_only_later_iterations_read_is_found_by_the_last_one(flow, tiny_config, monkeypatch):
    monkeypatch.setattr(flow, "BUFFERS", {})
    train(tiny_config(algorithm="own_flow:ByTheIterationBefore", iterations=4), Path("run"), backend=SERIAL)
    flow.BUFFERS.clear()  # as in another process
    different = [outcome.ref for outcome in replay(Path("run")) if not outcome.identical]
    assert [(ref.iteration, ref.stage) for ref in different] == [(3, "by_the_iteration_before")]
    flow.BUFFERS.clear()
    assert not [*replay(Path("run"), until_diff=True)][-1].identical


def test_stages_read_nothing_of_an_output_but_what_a_replay_reads(flow, tiny_config):
    train(tiny_config(algorithm="own_flow:InColumns"), Path("run"), backend=SERIAL)
    run = storage.open_run("run")
    before, after = (run.load(storage.StageRef(0, name, 1)) for name in ("in_columns", "summed"))
    np.testing.assert_array_equal(after.advantages, before.advantages)
    assert all(outcome.identical for outcome in replay(Path("run")))


@pytest.mark.parametrize(("name", "stored"), [("Float32", float(np.float32(0.1))), ("Whole", 3.0)])
def test_a_metric_that_is_a_number_of_another_type_replays_identical(flow, tiny_config, name, stored):
    train(tiny_config(iterations=1, algorithm=f"own_flow:{name}"), Path("run"), backend=SERIAL)
    assert storage.open_run("run")[0].update().metrics["own"] == stored
    assert all(outcome.identical for outcome in replay(Path("run")))


def test_the_rehearsal_names_who_draws_from_a_global_generator_and_offers_no_way_that_training_refuses(
    flow, tiny_config
):
    with pytest.raises(EnvError, match=r"Drift.step, line \d+ drew from .* of numpy.random, .* seeds$"):
        train(tiny_config(iterations=1, env="own_flow:Drift"), Path("run"), backend=SERIAL)
    assert not Path("run").exists()


def test_an_installed_environment_that_draws_from_a_global_generator_is_named_once(
    flow, tiny_config, monkeypatch, caplog
):
    monkeypatch.setattr(global_random, "is_installed", lambda file: Path(file).name == "own_flow.py")
    train(tiny_config(iterations=1, env={"name": "own_flow:Drift", "copies": "kept"}), Path("run"), backend=SERIAL)
    told = [record.getMessage() for record in caplog.records if "global generator" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("env.name is own_flow:Drift: own_flow:Drift.step, line ")


def test_a_module_that_is_only_filled_afterwards_passes_by_either_cure_that_its_refusal_names():
    state = torch.nn.Linear(3, 2).state_dict()

    def filled(build):
        build().load_state_dict(state)

    def forked():
        with torch.random.fork_rng():
            filled(lambda: torch.nn.Linear(3, 2))

    _, draw = GlobalRandomWatch().draw_of(lambda: filled(lambda: torch.nn.Linear(3, 2)), "adapt")
    assert str(draw).endswith(
        "set later with torch.nn.utils.skip_init(torch.nn.Linear, ...), or under `with torch.random.fork_rng():`"
    )
    skipped = partial(torch.nn.utils.skip_init, torch.nn.Linear, 3, 2)
    for work in (partial(filled, skipped), forked):
        assert GlobalRandomWatch().draw_of(work, "adapt")[1] is None


@pytest.fixture
def warned(caplog):
    """The warnings about global generators."""
    return lambda: [record.getMessage() for record in caplog.records if "global generator" in record.getMessage()]


def test_what_is_drawn_once_and_kept_is_warned_of_once_per_generator_and_stage(warned):
    watch = GlobalRandomWatch()

    def kept(name, values):
        if name not in values:
            values[name] = np.random.random()  # noqa: NPY002

    for stage in ("adapt", "adapt", "adapt", "meta_optimize"):
        values = {}
        assert watch.draw_of(partial(kept, "x", values), stage)[1] is None
    assert [words.split(",")[0] for words in warned()] == [
        "the global generator of numpy.random changed during adapt",
        "the global generator of numpy.random changed 3 times in this way; it is no longer watched during adapt",
        "the global generator of numpy.random changed during meta_optimize",
    ]
    assert "a value was drawn once and cached, so a replay in another process may differ" in warned()[0]


def test_an_error_of_repeated_work_is_named(warned):
    def work(left=[1]):  # noqa: B006
        left.pop()
        np.random.random()  # noqa: NPY002

    assert GlobalRandomWatch().draw_of(work, "adapt")[1] is None
    assert (
        "repeated (which raised IndexError: pop from empty list), no function drew from it. Either a value"
        in warned()[0]
    )


def test_work_beside_a_thread_that_draws_all_the_time_is_warned_of_and_not_refused(warned):
    done, drawn = threading.Event(), []

    def draw():
        while not done.is_set():
            np.random.random()  # noqa: NPY002
            drawn.append(torch.rand(1))

    def work():
        start = len(drawn)
        while len(drawn) < start + 3:
            sorted(range(9))

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        _, accused = GlobalRandomWatch().draw_of(work, "adapt")
    finally:
        done.set()
        thread.join()
    assert accused is None
    assert warned()[0].endswith("or another thread draws from it")


def test_what_another_thread_draws_is_no_fault_of_the_work():
    watch, calls = GlobalRandomWatch(), []

    def work():
        calls.append(1)
        thread = threading.Thread(target=random.random)
        thread.start()
        thread.join()

    assert [watch.draw_of(work, "adapt")[1] for _ in range(6)] == [None] * 6
    assert len(calls) == 9  # it is done again three times, and then this generator is watched no more
    _, draw = watch.draw_of(lambda: np.random.normal(size=2), "adapt")  # noqa: NPY002
    assert draw is not None
    assert draw.generator == "numpy.random"
    watch.stop()
    assert watch.draw_of(lambda: np.random.normal(size=2).shape, "adapt") == ((2,), None)  # noqa: NPY002


@pytest.mark.parametrize(
    ("kind", "work"),
    [
        (np.random.MT19937, lambda: np.random.normal()),  # noqa: NPY002 - every second number is kept from the draw before
        (np.random.PCG64, lambda: np.random.random()),  # noqa: NPY002
    ],
)
def test_draws_of_single_numbers_are_found_whatever_the_global_bit_generator(kind, work):
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(kind(0))
    try:
        _, draw = GlobalRandomWatch().draw_of(work, "adapt")
    finally:
        np.random.set_bit_generator(before)
    assert draw is not None
    assert draw.generator == "numpy.random"


def test_the_state_that_a_watch_reads_within_another_is_no_draw():
    def work():
        thread = threading.Thread(target=random.random)
        thread.start()
        thread.join()
        GlobalRandomWatch().draw_of(lambda: None, "the sampler")

    assert GlobalRandomWatch().draw_of(work, "collect_rollouts")[1] is None
