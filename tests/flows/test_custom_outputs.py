"""A stage that gives a dataclass of the user's: it is stored, replayed and read by what the class says of itself."""

import importlib
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import run as run_process

import numpy as np
import pyarrow.parquet as pq
import pytest

import metaloom
from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.optimize import optimize
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.thin import materialise, thin
from metaloom.flows.commands.train import resume, train
from metaloom.flows.graph.run_stages import require_stored_outputs
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.viewer.outputs import output_page
from metaloom.flows.viewer.values import slice_of
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import EpisodeBatch
from metaloom.stages.faults import StageFault
from metaloom.storage import IncompatibleFormat, LayoutMismatch, Retention, StageRef

SERIAL = Backend(workers=0)
FLOW = '''
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from metaloom.pipeline.algorithms.maml.settings import ProMP
from metaloom.pipeline.dataflow.edges import this_step
from metaloom.pipeline.dataflow.stage import EACH_STEP, Stage
from metaloom.pipeline.outputs import Axes
from metaloom.pipeline.types import EpisodeBatch, Samples
from metaloom.stages.graphs.on_policy import ON_POLICY



@dataclass(frozen=True)
class Spread:
    """How far the rewards of a task spread."""

    scale: Annotated[NDArray[np.float32], Axes("B", "standard deviation of the rewards", unit="m")]
    share: Annotated[NDArray[np.float64], Axes("B E T", "share of the step")]
    ends: Annotated[Mapping[str, NDArray[np.float32]], Axes("B E ...", "rewards at both ends")]
    steps: Annotated[NDArray[np.int64], Axes("", "environment steps", unit="steps")]

    @property
    def smoothing(self):
        return (1 + self.scale)[:, None, None]


@dataclass(frozen=True)
class Finer:
    scale: Annotated[NDArray[np.float64], Axes("B", "standard deviation of the rewards", unit="m")]


def spread(at, *, episodes: EpisodeBatch) -> Spread:
    if Path("killed").exists() and Path("again").exists() and (at.iteration, at.step) == (1, 1):
        Path("killed").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    rewards = episodes.rewards
    ends = {"last": rewards[:, :, -2:], "first": rewards[:, :, 0]}
    return Spread(rewards.std((1, 2)), np.float64(rewards) / 7, ends, np.array(episodes.num_steps))


def smooth(*, samples: Samples, spread: Spread) -> Samples:
    # By the class's own property, and in the order of the names, whether it was read from the disk or not.
    assert [*spread.ends] == sorted(spread.ends)
    return replace(samples, advantages=samples.advantages / np.float32(spread.smoothing))


def otherwise(**changes):
    return lambda at, *, episodes: replace(spread(at, episodes=episodes), **changes)


def wider(at, *, episodes):
    return replace(spread(at, episodes=episodes), ends={"first": np.zeros((4, 3, 1 + at.iteration), np.float32)})


SPREAD = Stage(spread, EACH_STEP, reads={"episodes": "rollouts"}, thinnable=True)
SMOOTH = Stage(smooth, EACH_STEP, group="smoothed_{step}", thinnable=True)


def graph(spread=SPREAD):
    """ON_POLICY that learns from smoothed samples."""
    measured = ON_POLICY.named("own").insert(spread, after="process_samples").edge(spread=this_step(spread))
    return measured.insert(SMOOTH, after=spread, gives="samples")


GRAPH = graph()
GRAPHS = {
    "NoAxes": graph(replace(SPREAD, output=dataclass(frozen=True)(type("Bare", (), {"__annotations__": {"v": int}})))),
    "OurName": graph(replace(SPREAD, output=type("Samples", (Spread,), {}))),
    "Float32": graph(replace(SPREAD, run=otherwise(share=np.zeros((4, 3, 10), np.float32)))),
    "FewAxes": graph(replace(SPREAD, run=otherwise(share=np.zeros((4, 3))))),
    "FewTasks": graph(replace(SPREAD, run=otherwise(scale=np.zeros(3, np.float32)))),
    "Endless": graph(replace(SPREAD, run=otherwise(share=np.full((4, 3, 10), np.nan)))),
    "Other": graph(replace(SPREAD, run=lambda *, episodes: episodes.lengths)),
    "Slashed": graph(replace(SPREAD, run=otherwise(ends={"a/b": np.zeros((4, 3), np.float32)}))),
    "Cased": graph(replace(SPREAD, run=otherwise(ends=dict.fromkeys(("End", "end"), np.zeros((4, 3), np.float32))))),
    "Wider": graph(replace(SPREAD, run=wider)),
}
class Smoothed(ProMP):
    graph: ClassVar[str] = "own_outputs:GRAPH"


for _name, _graph in GRAPHS.items():
    globals()[f"{_name}Graph"] = _graph
    _body = {"__module__": __name__, "__annotations__": {"graph": ClassVar[str]}, "graph": f"own_outputs:{_name}Graph"}
    globals()[_name] = type(_name, (ProMP,), _body)
'''


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    (folder := tmp_path_factory.mktemp("own") / "own_outputs.py").write_text(FLOW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder.parent), *sys.path])
        yield importlib.import_module("own_outputs")
    del sys.modules["own_outputs"]


@pytest.fixture(scope="module")
def trained(module, tmp_path_factory, tiny_config):
    path = tmp_path_factory.mktemp("trained") / "run"
    train(tiny_config(algorithm="own_outputs:Smoothed", iterations=2), path, backend=SERIAL)
    return path


@pytest.fixture
def flow(module, tmp_path, monkeypatch):
    """The module of the stages, in a folder where runs go."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    return module


@pytest.fixture
def run(flow, trained):
    """A copy of a run of two iterations."""
    return metaloom.open_run(shutil.copytree(trained, "run"))


def test_it_replays_identical_and_a_stage_that_reads_it_gets_the_class(run):
    assert storage.verify_run(run.path) == []
    assert all(outcome.identical for outcome in replay(run.path))
    assert [item.ref for item in run.record(StageRef(1, "smooth", 1)).inputs] == [
        StageRef(1, "process_samples", 1),
        StageRef(1, "spread", 1),
    ]


def test_the_schema_is_stored_and_a_reader_needs_no_class(run, flow):
    (stage,) = [stage for stage in json.loads((run.path / "run.json").read_text())["stages"] if "schema" in stage]
    assert stage["output"] == "Spread"
    assert stage["schema"]["description"] == "How far the rewards of a task spread."
    assert stage["schema"]["fields"][0] == {
        "name": "scale",
        "axes": ["task"],
        "dtype": "float32",
        "unit": "m",
        "description": "standard deviation of the rewards",
        "mapping": False,
    }
    code = (
        "import sys; from metaloom import storage; value = storage.open_run('run')[1].spread(1); "
        "print(type(value).__name__, value.steps, [*value.ends], 'own_outputs' in sys.modules)"
    )
    done = run_process([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "Spread 120 ['first', 'last'] False\n"
    assert not isinstance(run[1].spread(1), flow.Spread)


def test_iterations_have_an_accessor_for_every_stage_and_group(run):
    spread, rewards = run[1].spread(1), run[1].rollouts(1).rewards
    assert np.array_equal(spread.scale, rewards.std((1, 2)))
    assert np.array_equal(spread.ends["last"], rewards[:, :, -2:])
    assert run[1].spread(0, task=[2, 0]).ends["first"].shape == (2, 3)
    assert run[1].smooth(0).mask.shape == run[1].smoothed(0).mask.shape == run[1].collect_rollouts(0).rewards.shape
    assert {"spread", "smooth", "adapt"} <= {*dir(run[1])}
    with pytest.raises(AttributeError, match="an iteration has no 'spreads'; the stages of the run are initialize, "):
        _ = run[1].spreads
    with pytest.raises(
        storage.StageMissing, match=r"spread\(i=1, k=5\) is not stored.* an inner step of the iteration: 0, 1"
    ):
        run[1].spread(5)


def test_samples_that_training_did_not_learn_from_are_read_with_a_warning(run, caplog):
    run[1].samples(1)
    run[1].smooth(1)
    (warning,) = caplog.messages
    assert warning.endswith(
        "the iteration learned from smooth(i=1, k=1), not from the returned process_samples(i=1, k=1); "
        "run[1].smooth(1) reads the samples it learned from"
    )


def test_xarray_has_its_axes_units_and_tasks(run):
    data = run[1].xarray(1, stage="spread", task=[1, 3])
    assert data.attrs == {"iteration": 1, "step": 1, "description": "How far the rewards of a task spread."}
    assert data["share"].dims == ("task", "episode", "t")
    assert data["scale"].attrs == {"units": "m", "description": "standard deviation of the rewards"}
    assert data["ends.last"].dims == ("task", "episode", "ends.last_axis_2")
    assert data["steps"].item() == 120
    assert data["task_goal_x"].values.tolist() == run[1].tasks(task=[1, 3]).params[:, 0].tolist()
    description = run[1].xarray(stage="adapt").attrs["description"]
    assert description == "Per-task policy parameters, keyed by name, [B, ...] float32 each."
    assert run[1].xarray(stage="adapt")["params.float32"].dims == ("task", "params.float32_parameter")


def test_a_table_has_a_row_per_entry_along_the_axes_that_the_columns_share(run):
    by_step = run.table("spread", columns=["share"])
    assert by_step.column_names == ["iteration", "step", "task", "episode", "t", "share"]
    assert by_step.num_rows == run.steps().num_rows
    assert by_step["share"].to_pylist() == (run.steps()["reward"].to_numpy().astype(np.float64) / 7).tolist()
    by_task = run.table("spread", 1, ["scale", "share"], steps=1)
    assert by_task.column_names == ["iteration", "step", "task", "scale", "share"]
    assert by_task["scale"].to_pylist() == run[1].spread(1).scale.tolist()
    assert by_task.schema.field("scale").metadata == {b"unit": b"m"}
    assert run.table("spread").num_rows == 4
    assert run.table("tasks")["ids"].to_pylist() == run.tasks()["id"].to_pylist()
    by_episode = run.table("spread", columns=["ends.*"], steps=1)
    assert by_episode.column_names == ["iteration", "step", "task", "episode", "ends.first", "ends.last"]
    assert by_episode.equals(run.table("spread", columns=["ends.first", "ends.last"], steps=1))
    for unknown in ("scales", "scale.*", "end.*"):
        with pytest.raises(ValueError, match=rf"spread\(i=0, k=0\) has no column {re.escape(unknown)}; available colu"):
            run.table("spread", columns=[unknown])


def test_a_table_has_no_rows_after_the_end_of_an_episode(flow, tiny_config):
    config = tiny_config(
        algorithm="own_outputs:Smoothed", iterations=1, env="CartPole-v1", policy={"hidden_sizes": [4]}
    )
    train(config, Path("run"), backend=SERIAL)
    run = metaloom.open_run("run")
    assert run[0].rollouts(0).lengths.min() < 10
    shares, steps = run.table("spread", columns=["share"]), run.steps(columns=["step", "task", "episode", "t"])
    assert shares.select(steps.column_names).equals(steps)


def test_commands_show_it(run, capsys):
    def shown(*words):
        assert cli.run([*words]) == 0
        return capsys.readouterr().out

    first = [line.strip().split("  ")[0] for line in shown("show", "run@1").splitlines()]
    assert [line for line in first if line.startswith("sp")] == ["spread k=0", "spread k=1"]
    text = shown("show", "run@1", "--stage", "spread", "--step", "1")
    assert "Spread: How far the rewards of a task spread." in text
    assert "share task 4, episode 3, t 10 float64 1 share of the step" in " ".join(text.split())
    document = json.loads(shown("show", "run@1", "--stage", "spread", "--json"))
    assert document["inputs"][0]["stage"] == "collect_rollouts"
    assert [array["unit"] for array in document["arrays"] if array["name"] == "scale"] == ["m"]
    text = shown("show", "run@1", "--stage", "adapt")
    assert "task 4, params.float32_parameter" in text
    assert "TaskParams: Per-task policy parameters, keyed by name, [B, ...] float32 each." in text
    assert any(line.startswith("spread ") and line.endswith("  Spread") for line in shown("graph", "run").splitlines())
    shown("export", "run", "--to", "parquet", "--out", "out")
    assert pq.read_table("out/spread.parquet").column_names[:3] == ["iteration", "step", "scale"]
    assert cli.run(["show", "run@1", "--stage", "spreads"]) == 2
    assert "--stage must be one of initialize, " in capsys.readouterr().err


def test_the_page_shows_its_arrays(run):
    ref = StageRef(1, "spread", 1)
    page = output_page(run, ref)
    assert page["output"] == "Spread"
    assert [array["description"] for array in page["arrays"] if array["name"] == "steps"] == ["environment steps"]
    rows, _ = slice_of(run, ref, "spread_1/share", [2, 0, 0], 1, 2)
    assert np.array_equal(rows, run[1].spread(1).share[2])
    assert slice_of(run, ref, "spread_1/steps", [], None, 0)[0].tolist() == [[120.0]]


def test_its_arrays_are_thinned_and_come_back(run):
    before = run[0].spread(1).share
    thin(run.path, Retention(keep_last=1))
    assert run.is_thinned(StageRef(0, "spread", 1))
    assert all(outcome.identical for outcome in replay(run.path, 0))
    assert StageRef(0, "spread", 1) in set(materialise(run.path))
    assert np.array_equal(run[0].spread(1).share, before)


@pytest.mark.slow
def test_a_run_killed_in_such_a_stage_resumes_with_equal_digests(run, flow, tiny_config, digests):
    Path("killed").touch()
    Path("settings.json").write_text(json.dumps(run.config))
    code = (
        "import json, sys; from pathlib import Path; sys.path.append(sys.argv[1]); "
        "from metaloom.flows.commands.train import train; from metaloom.flows.rollouts.workers import Backend; "
        "from metaloom.pipeline.config.run import build_config; "
        "train(build_config(json.loads(Path('settings.json').read_text())), Path('again'), backend=Backend(workers=0))"
    )
    assert run_process([sys.executable, "-c", code, str(Path(flow.__file__).parent)]).returncode == -9
    assert not storage.open_run("again").contains(StageRef(1, "spread", 1))
    resume(Path("again"), backend=SERIAL)
    assert digests(Path("again")) == digests(run.path)


def test_a_class_that_changed_under_a_stored_run_is_refused(run, flow, monkeypatch):
    monkeypatch.setitem(flow.smooth.__annotations__, "spread", flow.Finer)
    monkeypatch.setattr(flow, "GRAPH", flow.graph(replace(flow.SPREAD, output=flow.Finer)))
    found = []
    for operation in (
        lambda: next(replay(run.path, 1)),
        lambda: resume(run.path, iterations=3, backend=SERIAL),
        lambda: optimize(run.path, 1),
        lambda: fork(run.path, 1, Path("fork")),
    ):
        with pytest.raises(IncompatibleFormat, match="expected what the run stores") as caught:
            operation()
        found.append(caught.value.found)
    assert {*found} == {
        "stage spread: Finer.scale is float64[task] in m, stored as float32[task] in m; "
        "Finer.share is absent, stored as float64[task, episode, t] in 1; "
        "Finer.ends is absent, stored as names -> float32[task, episode, ...] in 1; "
        "Finer.steps is absent, stored as int64[] in steps"
    }
    assert run[1].spread(1).steps == 120
    assert not Path("fork").exists()


@pytest.mark.parametrize(("name", "stored"), [("spread", "Spread"), ("smooth", "Samples")])
def test_a_stage_that_returns_another_class_than_its_run_stores_is_refused(run, flow, name, stored):
    changed = [replace(stage, output=EpisodeBatch) if stage.name == name else stage for stage in flow.GRAPH.stages]
    require_stored_outputs(storage.open_run(run.path), flow.GRAPH)
    with pytest.raises(IncompatibleFormat, match=f"stage {name}: it returns EpisodeBatch, stored as {stored}"):
        require_stored_outputs(storage.open_run(run.path), replace(flow.GRAPH, stages=tuple(changed)))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "NoAxes",
            "stage spread: Bare.v does not declare its axes and dtype; use Annotated[NDArray[np.float32], A",
        ),
        ("OurName", "stage spread returns a class named Samples, the name of a built-in output; choose another name"),
    ],
)
def test_a_class_that_cannot_be_stored_is_refused_before_a_folder_exists(flow, tiny_config, name, sentence):
    with pytest.raises(ConfigError) as caught:
        train(tiny_config(algorithm=f"own_outputs:{name}"), Path("run"), backend=SERIAL)
    assert str(caught.value).startswith(f"the graph own_outputs:{name}Graph: {sentence}")
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("name", "error", "sentence"),
    [
        ("Float32", StageFault, "spread k=0: Spread.share has dtype float32; expected float64"),
        ("FewAxes", StageFault, "spread k=0: Spread.share has shape [4, 3]; expected the axes task, episode, t"),
        (
            "FewTasks",
            StageFault,
            "Spread.share has 4 entries along task, but an earlier array has 3; expected equal lengths",
        ),
        ("Endless", StageFault, "spread k=0: share holds nan at task 0, episode 0, step 0, index [0, 0, 0] (120 of"),
        ("Other", StageFault, "spread k=0: the stage returned ndarray; expected Spread, its declared output"),
        ("Slashed", LayoutMismatch, "spread(i=0, k=0): an array named 'ends.a/b'; expected letters, digits, '_'"),
        ("Cased", LayoutMismatch, "names that differ only in case: ends.End and ends.end; expected names that differ"),
        (
            "Wider",
            LayoutMismatch,
            "run: iteration 1, spread k=0: spread_0/ends.first: shape (4, 3, 2); expected shape (4, 3",
        ),
    ],
)
def test_an_output_that_is_not_as_its_class_says_is_refused(flow, tiny_config, name, error, sentence):
    with pytest.raises(error) as caught:
        train(tiny_config(algorithm=f"own_outputs:{name}"), Path("run"), backend=SERIAL)
    assert sentence in str(caught.value)
    assert Path("run").exists() == (name == "Wider")
