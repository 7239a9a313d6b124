"""Formats that need a package of their own, and the command."""

import json
import re
import sys
from datetime import datetime
from pathlib import Path

import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest
from gymnasium.spaces import Box
from h5py import h5g

from metaloom import storage
from metaloom.flows import cli, exports
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.thin import thin
from metaloom.flows.commands.train import resume, train
from metaloom.flows.errors import UsageError
from metaloom.flows.exports import export
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.runs import parse_span
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.registry import make_env

minari = pytest.importorskip("minari")


@pytest.fixture(scope="module")
def stored(tmp_path_factory, tiny_config):
    path = tmp_path_factory.mktemp("runs") / "my run.1"
    env = {"name": "point-corner", "options": {"reward": "dense"}}
    train(tiny_config(env=env, iterations=2), path, backend=Backend(workers=0))
    return storage.open_run(path)


def test_minari_loads_and_iterates_what_was_exported(stored, tmp_path, monkeypatch):
    monkeypatch.setattr("metaloom.flows.exports.minari.make_env", None)  # the recorded spaces are enough
    result = export(stored, tmp_path / "datasets", "minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    dataset = minari.load_dataset("my-run-1-v0")
    assert dataset.total_episodes == result.rows == 2 * 2 * 4 * 3
    assert dataset.total_steps == sum(stored[i].rollouts(k).num_steps for i in range(2) for k in range(2))
    places = [(i, k, b, e) for i in range(2) for k in range(2) for b in range(4) for e in range(3)]
    for episode, place in zip(dataset.iterate_episodes(), places, strict=True):
        i, k, b, e = place
        batch = stored[i].rollouts(k)
        T = int(batch.lengths[b, e])
        np.testing.assert_array_equal(episode.observations, batch.observations[b, e, : T + 1])
        # point-corner moves by at most 0.2 in either direction; a policy's actions go to 10.
        np.testing.assert_allclose(episode.actions, np.clip(0.02 * batch.actions[b, e, :T], -0.2, 0.2), rtol=1e-5)
        np.testing.assert_array_equal(episode.rewards, batch.rewards[b, e, :T])
        assert episode.terminations.tolist() == [False] * (T - 1) + [bool(batch.terminated[b, e])]
        assert episode.truncations.tolist() == [False] * (T - 1) + [bool(batch.truncated[b, e])]
    with h5py.File(tmp_path / "datasets" / "my-run-1-v0" / "data" / "main_data.hdf5") as file:  # without timestamps
        assert [h5g.get_objinfo(file.id, name).mtime for name in (b"episode_0", b"episode_0/rewards")] == [0, 0]
    assert dataset.spec.dataset_id == "my-run-1-v0"
    assert dataset.observation_space == Box(-np.inf, np.inf, (2,), np.float32)
    assert dataset.action_space == make_env(EnvConfig(name="point-corner", action_scale=None)).action_space


def test_a_minari_episode_says_where_in_the_run_it_is_from(stored, tmp_path):
    export(stored, tmp_path / "datasets", "minari", iterations=1, steps=(1,))
    dataset = minari.MinariDataset(tmp_path / "datasets" / "my-run-1-v0" / "data")
    assert dataset.total_episodes == 12
    (metadata,) = dataset.storage.get_episode_metadata([7])
    options = metadata["options"]
    assert not {"lengths", "terminated", "truncated"} & {*options}
    assert [int(options[name]) for name in ("iteration", "step", "task", "episode")] == [1, 1, 2, 1]
    tasks = stored[1].tasks()
    assert {name: options[f"task_{name}"] for name in tasks.names} == dict(
        zip(tasks.names, tasks.params[2], strict=True)
    )


def test_tensorboard_shows_every_metric_of_every_iteration(stored, tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = export(stored, tmp_path / "events", "tensorboard")
    events = accumulators.EventAccumulator(str(tmp_path / "events"), size_guidance={"scalars": 0})
    events.Reload()
    metrics = stored.metrics().to_pylist()
    tags = [tag for tag in events.Tags()["scalars"] if tag.partition("/")[0] not in ("by_class", "time")]
    assert len(tags) == len(metrics[0]) - 1
    assert result.rows == sum(len(events.Scalars(tag)) for tag in events.Tags()["scalars"] if tag[:5] != "time/")
    returns = events.Scalars("step_1/average_return")
    assert [event.step for event in returns] == [0, 1]
    np.testing.assert_allclose(
        [event.value for event in returns], [row["step_1.average_return"] for row in metrics], rtol=1e-6
    )
    for i, event in enumerate(returns):
        record = stored.record(stored.last_ref(i))
        ended = datetime.fromisoformat(record.started).timestamp() + record.seconds
        assert event.wall_time == pytest.approx(ended, abs=1e-5)


@pytest.mark.parametrize("to", exports.format_names())
def test_the_command_writes_every_format_and_says_what(stored, tmp_path, capsys, to):
    command = ["export", str(stored.path), "--to", to, "--out", str(tmp_path / "out"), "--json"]
    assert cli.run(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["path"], told["iterations"], told["skipped"]) == (str(tmp_path / "out"), 2, [])
    assert told["rows"] > 0
    if exports.format_of(to).grows:
        assert cli.run(command) == 0
        assert json.loads(capsys.readouterr().out)["rows"] == 0
        return
    assert cli.run(command) == 2
    assert "the path already exists" in capsys.readouterr().err


@pytest.mark.parametrize("to", exports.format_names())
def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(stored, tmp_path, capsys, to):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "deep" / "out"
    assert cli.run(["export", str(stored.path), "--to", to, "--out", str(out)]) == 1
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith(f"metaloom: {out}: Not a directory: ")
    assert "; this needs free space and permission to write" in message


@pytest.mark.parametrize("to", exports.format_names())
def test_a_run_of_one_task_is_exported_without_places_that_no_episode_took(tmp_path, capsys, to):
    env = {"name": "CartPole-v1"}
    settings = {"env": env, "algorithm": {"name": "a2c"}, "iterations": 2, "min_steps": 50, "episodes_per_task": 9}
    train(build_config({**settings, "max_episode_steps": 20}), tmp_path / "run", backend=Backend(workers=0))
    command = ["export", str(tmp_path / "run"), "--to", to, "--out", str(tmp_path / "out"), "--json"]
    assert cli.run(command) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    episodes = storage.open_run(tmp_path / "run").episodes()
    assert 4 < len(episodes) < 18
    if to in ("minari", "histories"):
        assert rows == len(episodes)
    if to == "histories":
        (file,) = (tmp_path / "out").glob("*.parquet")
        history = pq.read_table(file)
        assert history["length"].to_pylist() == episodes["length"].to_pylist()
        assert history["order"].to_pylist() == list(range(rows))
        assert [len(o) for o in history["observations"].to_pylist()] == [n + 1 for n in history["length"].to_pylist()]


def test_the_command_names_what_it_left_out(tmp_path, tiny_config, capsys):
    train(tiny_config(iterations=2), tmp_path / "run", backend=Backend(workers=0))
    for file in (tmp_path / "run" / "_commits").glob("00000000.collect_rollouts.*"):
        file.unlink()
    assert cli.run(["export", str(tmp_path / "run"), "--to", "parquet", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "iteration 0 skipped: no episodes" in printed
    assert "1 iteration," in printed


@pytest.mark.parametrize("to", ["parquet", "histories", "minari", "tensorboard", "delta"])
def test_a_thinned_fork_is_exported_without_what_was_thinned(tmp_path, tiny_config, monkeypatch, to):
    evaluation = {"every": 2, "num_tasks": 2, "adaptation_steps": 1, "test_episodes": 2}
    train(tiny_config(iterations=2, evaluation=evaluation), tmp_path / "run", backend=Backend(workers=0))
    thin(tmp_path / "run", storage.Retention(keep_last=1))
    fork(tmp_path / "run", 2, tmp_path / "child", ["iterations=3"])
    resume(tmp_path / "child", backend=Backend(workers=0))
    run = storage.open_run(tmp_path / "child")
    result = export(run, tmp_path / "out", to)
    if to in ("tensorboard", "delta"):
        assert (result.iterations, result.skipped) == (3, [])
        return
    assert result.iterations == 2
    ((iteration, reason),) = result.skipped
    assert iteration == 0
    assert "was thinned" in reason
    if to == "parquet":
        for name in ("episodes", "tasks", "metrics", "evaluations"):
            assert pq.ParquetFile(tmp_path / "out" / f"{name}.parquet").read().equals(getattr(run, name)())
    if to == "minari":
        dataset = minari.MinariDataset(tmp_path / "out" / "child-v0" / "data")
        assert dataset.total_episodes == 2 * 2 * 4 * 3
    thin(tmp_path / "child", storage.Retention(keep_last=0))
    if to == "parquet":
        assert export(run, tmp_path / "tables", to).iterations == 0
        return
    with pytest.raises(UsageError, match=r"metaloom replay .*child --materialise"):
        export(run, tmp_path / "nothing", to)
    assert not (tmp_path / "nothing").exists()


def test_places_without_an_episode_are_no_rows_of_a_history(tmp_path):
    changes = ["env=CartPole-v1", "iterations=2", "min_steps=60", "episodes_per_task=12", "max_episode_steps=20"]
    config = build_config(override(load_settings("ppo"), [*changes, "policy.hidden_sizes=[8]"]))
    train(config, tmp_path / "run", backend=Backend(workers=0))
    run = storage.open_run(tmp_path / "run")
    lengths = [run[i].rollouts(0).lengths for i in range(2)]
    assert (lengths[0] == 0).any()
    result = export(run, tmp_path / "out", "histories", by="position")
    table = pq.ParquetFile(tmp_path / "out" / "position-00000000.parquet").read()
    assert result.rows == table.num_rows == sum(int((n > 0).sum()) for n in lengths)
    assert table["length"].to_pylist() == [int(n) for row in lengths for n in row.ravel() if n > 0]
    assert [len(row) for row in table["actions"].to_pylist()] == table["length"].to_pylist()
    assert table["order"].to_pylist() == list(range(table.num_rows))


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("parquet", {"by": "task"}, "--to parquet does not support --by"),
        ("tensorboard", {"steps": (0,)}, "remove it"),
        ("delta", {"iterations": 1}, "--to delta does not support --iterations"),
        ("parquet", {"steps": (5,)}, "the run has no inner step 5; --step must be one of 0, 1"),
        ("parquet", {"iterations": slice(5, 6)}, "no complete iteration"),
    ],
)
def test_options_that_a_format_does_not_have_are_refused(stored, tmp_path, to, options, message):
    with pytest.raises(UsageError, match=message):
        export(stored, tmp_path / "out", to, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("to", "module"),
    [("minari", "minari"), ("tensorboard", "tensorboard.summary.writer.event_file_writer"), ("delta", "deltalake")],
)
def test_a_package_that_is_missing_is_named_with_its_extra(stored, tmp_path, monkeypatch, to, module):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"metaloom.flows.exports.{to}", raising=False)
    with pytest.raises(UsageError, match=rf"pip install 'metaloom\[{to}\]'"):
        export(stored, tmp_path / "out", to)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("7", 7),
        ("-1", -1),
        ("2:5", slice(2, 5)),
        (":5", slice(None, 5)),
        ("-3:", slice(-3, None)),
        (":", slice(None, None)),
    ],
)
def test_iterations_are_chosen_as_python_slices(text, parsed):
    assert parse_span("--iterations", text) == parsed


@pytest.mark.parametrize("text", ["", "a", "1:2:3", "1-2", "1,2"])
def test_other_words_for_iterations_are_refused(text):
    with pytest.raises(UsageError, match="expected N or FROM:TO"):
        parse_span("--iterations", text)


@pytest.fixture(params=["my_formats:CSV", "csv"])
def csv_format(request, tmp_path, monkeypatch):
    """The format that docs/export.md makes, in a module of the user's and by an entry point."""
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    (source,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "CSV = " in block)
    (tmp_path / "my_formats.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    if request.param == "csv":
        (distribution := tmp_path / "my_formats-1.dist-info").mkdir()
        (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: my-formats\nVersion: 1\n")
        (distribution / "entry_points.txt").write_text(
            "[metaloom.exports]\nxml = my_formats:XML\ncsv = my_formats:CSV\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        assert [*map(exports.format_names().__getitem__, (0, -1))] == ["csv", "xml"]
    yield request.param
    sys.modules.pop("my_formats", None)
    if str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))


def test_a_users_format_writes_and_refuses_the_options_it_does_not_take(csv_format, stored, tmp_path, capsys):
    command = ["export", str(stored.path), "--to", csv_format, "--out", str(tmp_path / "out")]
    assert cli.run([*command, "--step", "0"]) == 2
    assert f"--to {csv_format} does not support --step" in capsys.readouterr().err
    assert cli.run([*command, "--iterations", "1:"]) == 0
    rows = (tmp_path / "out" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 2
    assert rows[0].startswith("iteration,")
    assert "1 iteration, 1 row " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:CSV", "No module named 'no_such_module'"),
        ("json:CSV", "module:NAME for a graph or export format)"),
        ("json:dumps", "an object of builtins:function; use module:FORMAT, the path of an ExportFormat"),
    ],
)
def test_a_users_format_that_is_none_is_refused_before_anything_is_written(name, message, stored, tmp_path, capsys):
    assert cli.run(["export", str(stored.path), "--to", name, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_format_refuses_a_function_that_it_could_not_call():
    def export_rows(run, folder, done, rows):
        """Needs what no option gives."""

    with pytest.raises(
        TypeError, match=r"export_rows\(run, folder, done, rows\): missing .* 'rows'; it must take \(run, f"
    ):
        exports.ExportFormat(export_rows)


def test_a_format_that_does_not_exist_is_refused_with_those_that_do(stored, tmp_path, capsys):
    assert cli.run(["export", str(stored.path), "--to", "parket", "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "use one of delta, histories, minari, parquet, tensorboard, or module:FORMAT; did you mean parquet?" in told
    assert cli.run(["export", str(stored.path), "--to", "onnx", "--out", str(tmp_path / "out")]) == 2
    assert "`metaloom policy RUN --out policy.onnx`" in capsys.readouterr().err


@pytest.mark.parametrize("option", [{"steps": (0,)}, {"by": "task"}])
@pytest.mark.parametrize("to", exports.format_names())
def test_every_option_is_honoured_or_refused(stored, tmp_path, to, option):
    (name,) = option
    if not exports.format_of(to).takes(name):
        with pytest.raises(UsageError, match="does not support --"):
            export(stored, tmp_path / "out", to, **option)
        return
    rows = export(stored, tmp_path / "out", to, **option).rows
    everything = export(stored, tmp_path / "all", to).rows
    assert rows == (everything // 2 if name == "steps" else everything)
