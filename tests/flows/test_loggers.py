"""TensorBoard, Weights & Biases and MLflow beside a training."""

import contextlib
import importlib
import io
import json
import logging
import math
import os
import socket
import struct
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import requests
from PIL import Image

import metaloom
from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.train import resume, train
from metaloom.flows.errors import UsageError
from metaloom.flows.exports import export
from metaloom.flows.loggers import live
from metaloom.flows.loggers.live import logging_to
from metaloom.flows.loggers.numbers import timings
from metaloom.flows.observer import IterationReport, Observer
from metaloom.flows.rollouts.workers import Backend

# SQLAlchemy tells MLflow of what it will have to change.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow", "ignore:The ``noload`` loader strategy")

IN_PROCESS = Backend(workers=0)
PLACES = ("WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")


@pytest.fixture(autouse=True)
def as_nobody_has_set_them(monkeypatch):
    for name in PLACES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def proxy():
    """A place where requests to anywhere else arrive."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.fixture(scope="module")
def logged(tmp_path_factory, tiny_config, proxy):
    """A run, with classes of tasks and an evaluation, that the command has logged to all of them."""
    path = tmp_path_factory.mktemp("runs") / "first"
    config = tiny_config(
        env={"name": "half-cheetah-dir"},
        iterations=2,
        task_sampling="balanced",
        evaluation={"every": 2, "num_tasks": 2, "episodes": 1, "test_episodes": 1},
    )
    settings = path.with_name("settings.json")
    settings.write_text(config.model_dump_json())
    logs = ("--log", "tensorboard", "--log", "wandb", "--log", "mlflow")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            patch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in (*PLACES, "no_proxy", "NO_PROXY"):
            patch.delenv(name, raising=False)
        assert cli.run(["train", str(settings), "--run", str(path), "--workers", "0", *logs]) == 0
    return storage.open_run(path)


def events_of(folder):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "histograms": 0})
    events.Reload()
    return events


def wandb_records(folder):
    """Records of the only run that lies in a folder. The file is a LevelDB log behind seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("offline-run-*/*.wandb")
    raw, place, whole = file.read_bytes(), 7, b""
    records = []
    while place + 7 <= len(raw):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        size, kind = struct.unpack_from("<HB", raw, place + 4)
        whole += raw[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # complete, or the last part of one
            records.append(Record.FromString(whole))
            whole = b""
    return records


def wandb_history(folder):
    """What was logged by step; of what has several fields, only what it is."""
    by_step = {}
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            items = [item for item in record.history.item if item.nested_key[1:] in ([], ["_type"])]
            row = {item.nested_key[0]: json.loads(item.value_json) for item in items}
            by_step.setdefault(row["_step"], {}).update(row)
    return by_step


def mlflow_runs(folder):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (experiment,) = (found for found in client.search_experiments() if found.name == "metaloom")
    return client, client.search_runs([experiment.experiment_id])


def test_tensorboard_has_every_number_and_the_export_has_the_same(logged, tmp_path):
    events = events_of(logged.path.parent / "logs" / "tensorboard" / "first")
    export(logged, tmp_path / "out", "tensorboard")
    exported = events_of(tmp_path / "out")
    # Times are measured from elsewhere.
    tags, there = (
        sorted(tag for tag in found.Tags()["scalars"] if not tag.startswith("time/")) for found in (events, exported)
    )
    assert tags == there
    for tag in tags:
        live_values, exported_values = ([(e.step, e.value) for e in found.Scalars(tag)] for found in (events, exported))
        np.testing.assert_array_equal(live_values, exported_values)  # NaN equals NaN
    metrics = logged.metrics().to_pylist()
    assert [e.value for e in events.Scalars("step_1/average_return")] == [
        np.float32(row["step_1.average_return"]) for row in metrics
    ]
    forward = [
        row
        for row in metaloom.open_run(logged.path).class_returns().to_pylist()
        if (row["class"], row["step"]) == ("forward", 1)
    ]
    np.testing.assert_array_equal(
        [e.value for e in events.Scalars("by_class/step_1.forward")],
        np.array([row["average_return"] for row in forward], np.float32),
    )
    assert [e.step for e in events.Scalars("evaluation/after_1_steps")] == [1]
    for found in (events, exported):
        assert found.Tags()["histograms"] == ["step_0/task_returns", "step_1/task_returns"]
    histogram = events.Histograms("step_1/task_returns")[1].histogram_value
    assert (histogram.num, sum(histogram.bucket)) == (4, 4)
    assert math.isclose(histogram.sum / 4, metrics[1]["step_1.average_return"], rel_tol=1e-5)


def test_tensorboard_has_hyper_parameters_and_a_film(logged):
    events = events_of(logged.path.parent / "logs" / "tensorboard" / "first")
    (film,) = events.Images("film")
    assert (film.step, film.encoded_image_string[:6]) == (1, b"GIF89a")
    with Image.open(io.BytesIO(film.encoded_image_string)) as picture:
        assert picture.size == (film.width, film.height)
    (file,) = (logged.path.parent / "logs" / "tensorboard" / "first").iterdir()
    loaders = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
    values = [value for event in loaders.LegacyEventFileLoader(str(file)).Load() for value in event.summary.value]
    assert [value.image.colorspace for value in values if value.tag == "film"] == [3]  # RGB
    assert [value.tag for value in values].count("_hparams_/experiment") == 1
    told = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"algorithm.clip_eps" in told
    assert b"step_1/average_return" in events.summary_metadata["_hparams_/experiment"].plugin_data.content


def test_wandb_keeps_all_of_it_offline(logged):
    pytest.importorskip("wandb")
    folder = logged.path.parent / "logs" / "wandb"
    by_step = wandb_history(folder)
    metrics = logged.metrics().to_pylist()
    assert {i: row["step_1/average_return"] for i, row in by_step.items()} == {
        i: row["step_1.average_return"] for i, row in enumerate(metrics)
    }
    for row in by_step.values():
        assert row["step_1/task_returns"] == "histogram"
        assert math.isfinite(row["by_class/step_0.backward"])
    assert [row.get("film") for row in by_step.values()] == [None, "video-file"]
    (begun,) = (r.run for r in wandb_records(folder) if r.WhichOneof("record_type") == "run")
    assert (begun.run_id, begun.display_name) == (logged.info["id"].replace("-", ""), "first")
    assert begun.project == "metaloom"
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    config = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert config["algorithm"]["clip_eps"] == logged.config["algorithm"]["clip_eps"]
    # Neither the program, nor the machine, nor the repository.
    kinds = {record.WhichOneof("record_type") for record in wandb_records(folder)}
    assert not {"stats", "output", "output_raw"} & kinds
    assert not list(folder.glob("*/files/wandb-metadata.json"))


def test_wandb_is_where_its_variables_say(logged, monkeypatch, tmp_path):
    wandb, given = pytest.importorskip("wandb"), {}
    monkeypatch.setattr(wandb, "init", lambda **options: given.update(options))
    live.opener("wandb")(logged, tmp_path / "logs")
    assert given["dir"] == str(tmp_path / "logs")
    assert (given["resume"], given["allow_val_change"]) == ("allow", True)
    sent = given["settings"]
    assert all((sent.silent, sent.disable_git, sent.disable_code, sent.x_disable_stats, sent.x_disable_meta))
    assert (tmp_path / "logs").is_dir()  # W&B 0.19 would write to a temporary folder instead
    for name, value in (("PROJECT", "mine"), ("DIR", str(tmp_path / "own")), ("MODE", "disabled")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    live.opener("wandb")(logged, tmp_path / "logs")
    assert (given["project"], given["dir"], given["settings"].mode) == ("mine", str(tmp_path / "own"), "disabled")


def test_mlflow_has_numbers_settings_and_the_film(logged):
    pytest.importorskip("mlflow")
    client, (run,) = mlflow_runs(logged.path.parent / "logs")
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "step_1/average_return")
    metrics = logged.metrics().to_pylist()
    assert [(m.step, m.value) for m in history] == [(i, row["step_1.average_return"]) for i, row in enumerate(metrics)]
    assert run.data.params["algorithm.name"] == "promp"
    returns = logged.episodes().to_pandas().query("iteration == 1 and step == 0").groupby("task")["return"].mean()
    assert run.data.metrics["step_0/task_returns.highest"] == pytest.approx(returns.max())
    for name, share in (("lowest", 0), ("lower_quartile", 0.25), ("median", 0.5), ("upper_quartile", 0.75)):
        assert run.data.metrics[f"step_0/task_returns.{name}"] == pytest.approx(returns.quantile(share))
    written = (logged.path.parent / "logs" / "mlflow.db").stat().st_mtime
    assert all(0 <= written - metric.timestamp / 1000 < 600 for metric in history)
    assert "by_class/step_1.balanced_standard_error" in run.data.metrics
    (film,) = client.list_artifacts(run.info.run_id, "films")
    assert film.path == "films/iteration-00000001.gif"


def test_mlflow_gets_every_setting_once_in_parts_that_it_accepts_and_tells_nobody_else(logged, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    asked = {"HTTP_REQUEST_TIMEOUT": "10", "HTTP_REQUEST_MAX_RETRIES": "1", "DISABLE_TELEMETRY": "true"}
    for name in asked:
        monkeypatch.setenv(f"MLFLOW_{name}", "")
        monkeypatch.delenv(f"MLFLOW_{name}")
    sent = []
    known = SimpleNamespace(experiment_id="1", info=SimpleNamespace(run_id="2"))
    client = SimpleNamespace(
        get_experiment_by_name=lambda name: known,
        search_runs=lambda *words, **options: [],
        create_run=lambda *words, **options: known,
        log_batch=lambda run, params: sent.append({param.key: param.value for param in params}),
    )
    monkeypatch.setattr("mlflow.MlflowClient", lambda uri: client)
    settings = {f"setting_{number}": number for number in range(201)} | {"long": "x" * 501, "odd=": 1}
    live.opener("mlflow")(SimpleNamespace(info=logged.info, path=logged.path, config=settings), tmp_path)
    assert [len(part) for part in sent] == [100, 100, 3]
    told = {key: value for part in sent for key, value in part.items()}
    assert told == {f"setting_{n}": str(n) for n in range(201)} | {"long": "x" * 500, "odd_": "1"}
    assert {name: os.environ[f"MLFLOW_{name}"] for name in asked} == asked


def test_training_that_goes_on_is_the_same_run_there(tiny_config, tmp_path, copy_tiny_run, monkeypatch):
    pytest.importorskip("mlflow")
    # MLflow 3.1 does not make the folder of its database. MLflow is opened first, because it is the last.
    monkeypatch.setattr("mlflow.store.db.utils._make_parent_dirs_if_sqlite", lambda uri: None, raising=False)
    path = copy_tiny_run(tmp_path / "run")
    for iterations in (4, 5):
        with logging_to(["tensorboard", "mlflow"], path, Observer()) as observer:
            resume(path, iterations=iterations, backend=IN_PROCESS, observer=observer)
    client, (run,) = mlflow_runs(tmp_path / "logs")
    steps = [m.step for m in client.get_metric_history(run.info.run_id, "step_1/average_return")]
    assert steps == [3, 4]
    events = events_of(tmp_path / "logs" / "tensorboard" / "run")
    assert [e.step for e in events.Scalars("step_1/average_return")] == [3, 4]


class Broken:
    """A logger that fails where it is told to."""

    def __init__(self, where: str, told: list[str]) -> None:
        self.where, self.told = where, told

    def say(self, what: str) -> None:
        self.told.append(what)
        if what == self.where:
            raise ConnectionError(f"{what} of a server that is gone\nand more")

    def iteration(self, report, ended):
        self.say("iteration")

    def film(self, file, report):
        assert file.read_bytes()[:3] == b"GIF"
        self.say("film")

    def close(self, failed):
        self.say(f"close {failed}")


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("open", ["open"]),
        ("iteration", ["iteration", "close True"]),
        ("film", [*["iteration"] * 3, "film", "close True"]),
        ("close False", [*["iteration"] * 3, "film", "close False", "close True"]),
    ],
)
def test_a_logger_that_fails_is_said_once_and_the_run_goes_on(
    tiny_config, tmp_path, monkeypatch, caplog, copy_tiny_run, digests, where, told
):
    seen = []

    def opened(run, folder):
        logger = Broken(where, seen)
        if where == "open":
            logger.say("open")
        return logger

    monkeypatch.setattr(live, "opener", lambda name: opened)
    path = tmp_path / "run"
    with caplog.at_level(logging.WARNING), logging_to(["tensorboard"], path, Observer()) as observer:
        result = train(tiny_config(), path, backend=IN_PROCESS, observer=observer)
    assert (result.iterations_done, result.stopped) == (3, False)
    assert seen == told
    (line,) = (record.getMessage() for record in caplog.records if "which continues" in record.getMessage())
    assert line.endswith(
        f"tensorboard stopped logging this run, which continues: ConnectionError: {where} of a server that is gone"
    )
    assert digests(path) == digests(copy_tiny_run(tmp_path / "as it is without"))


def test_a_password_in_the_address_of_a_server_is_not_kept_with_the_run(tmp_path, monkeypatch, caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://somebody:p4ss@127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    small = ["--workers", "0", "--log", "mlflow", "--set", "iterations=1", "--set", "num_tasks=2"]
    assert cli.run(["train", "promp-point-corner", "--run", str(tmp_path / "run"), *small]) == 0
    assert f"http://...@127.0.0.1:{port}/" in caplog.text
    assert "p4ss" not in caplog.text
    assert not any(b"p4ss" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("error", "tried"),
    [
        (ZeroDivisionError("of the picture"), ["iteration", "video", "iteration", "iteration"]),
        # Outputs that are not visible yet are waited for until the end.
        (
            storage.StageMissing("run", found="nothing", required="episodes", action="Wait"),
            [*["iteration", "video"] * 3],
        ),
    ],
)
def test_what_cannot_be_filmed_is_said_once_and_logged_without_films(
    copy_tiny_run, tmp_path, monkeypatch, caplog, error, tried
):
    seen = []

    def video(*args, **options):
        seen.append("video")
        raise error

    monkeypatch.setattr(live, "opener", lambda name: lambda run, folder: Broken("never", seen))
    monkeypatch.setattr("metaloom.flows.films.video.video", video)
    path = copy_tiny_run(tmp_path / "run")
    with logging_to(["wandb"], path, Observer(), film_every=1) as observer:
        observer.stage_started(storage.StageRef(0, "sample_tasks"))
        for i in range(3):
            observer.iteration_done(IterationReport(i, 3, {}, {}, 1.0, None))
    assert seen == [*tried, "close False"]
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.endswith(f"no videos are logged: {error}")


def test_films_are_made_as_often_as_asked_and_of_the_last_iteration(tiny_config, tmp_path, monkeypatch):
    seen, renderers = [], []

    def video(folder, iteration, file, *, renderer, **options):
        file.write_bytes(b"GIF")
        renderers.append(renderer)
        assert options == {"size": (320, 240), "every": 2}

    monkeypatch.setattr(live, "opener", lambda name: lambda run, folder: Broken("never", seen))
    monkeypatch.setattr(live, "choose_renderer", lambda name: "egl")
    monkeypatch.setattr("metaloom.flows.films.video.video", video)
    with logging_to(["wandb"], tmp_path / "run", Observer(), film_every=2) as observer:
        train(tiny_config(), tmp_path / "run", backend=IN_PROCESS, observer=observer)
    assert seen == ["iteration", "iteration", "film", "iteration", "film", "close False"]
    assert renderers == ["egl", "egl"]


def test_loggers_are_told_that_training_failed(tiny_config, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(live, "opener", lambda name: lambda run, folder: Broken("never", seen))

    def fail(report):
        raise RuntimeError("of the training")

    watching = logging_to(["wandb"], tmp_path / "run", Observer(iteration_done=fail))
    with pytest.raises(RuntimeError, match="of the training"), watching as observer:
        train(tiny_config(), tmp_path / "run", backend=IN_PROCESS, observer=observer)
    assert seen == ["iteration", "close True"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_package_that_is_missing_is_named_before_anything_is_made(tmp_path, monkeypatch, name):
    monkeypatch.setattr("metaloom.flows.loggers.find_spec", lambda package: None)
    with pytest.raises(UsageError, match=rf"{name} is not installed; `pip install 'metaloom\[{name}\]'`"):
        metaloom.train("promp-point-corner", tmp_path / "run", iterations=1, num_tasks=1, log=[name])
    assert not (tmp_path / "run").exists()


def test_after_training_the_command_says_where_tensorboard_looks(tmp_path, capsys):
    sizes = [part for setting in ("iterations=1", "num_tasks=1", "episodes_per_task=1") for part in ("--set", setting)]
    run = str(tmp_path / "runs" / "run")
    assert cli.run(["train", "first-steps", "--run", run, *sizes, "--workers", "0", "--log", "tensorboard"]) == 0
    said = capsys.readouterr().out.split("tensorboard --logdir ")[1]
    assert [path.name for path in Path(said.strip()).iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--log", "tensorbord"], "tensorboard"),
        (["--film-every", "2"], "--film-every requires --log"),
        (["--log", "wandb", "--film-every", "0"], "Must be >= 1"),
    ],
)
def test_the_command_refuses_what_cannot_be_logged(tmp_path, capsys, options, message):
    command = ["train", "promp-point-corner", "--run", str(tmp_path / "run"), *options]
    with contextlib.suppress(SystemExit):
        assert cli.run(command) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_films_are_refused_without_a_logger_that_keeps_them(tmp_path):
    with (
        pytest.raises(UsageError, match="logging videos requires at least one logger"),
        logging_to([], tmp_path / "run", Observer(), film_every=2),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("csv", "unknown logger csv; use one of mlflow, tensorboard, wandb, watch, or module:function$"),
        ("tensorbord", "or module:function; did you mean tensorboard"),
        ("my_watch:nothing", "my_watch:nothing"),
        ("my_watch:SEEN", "the logger my_watch:SEEN is a list; it must be a function"),
    ],
)
def test_python_refuses_loggers_that_there_are_not(watch, tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        metaloom.train("promp-point-corner", tmp_path / "run", iterations=1, num_tasks=1, log=[name])
    assert not (tmp_path / "run").exists()


WATCH = """
SEEN = []

def note(iteration):
    stages = [str(iteration.run.record(ref).ref) for ref in iteration.refs]
    SEEN.append((iteration.index, iteration.metrics(), iteration.learner().params.keys(), stages[-1]))

def fail(iteration):
    SEEN.append(iteration.index)
    raise RuntimeError("of a function")
"""


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """A module with a function that keeps what it is called with."""
    (tmp_path / "my_watch.py").write_text(WATCH)
    installed = tmp_path / "my_watch-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-watch\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[metaloom.loggers]\nwatch = my_watch:note\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("my_watch")
    del sys.modules["my_watch"]


@pytest.mark.parametrize("name", ["my_watch:note", "watch"])
def test_a_function_is_called_with_each_iteration_once_all_of_it_is_stored(
    watch, tiny_config, tmp_path, copy_tiny_run, digests, name
):
    run = metaloom.train(tiny_config(), tmp_path / "run", log=[name], progress=False)
    last = [f"meta_optimize(i={i}, k=0)" for i in range(3)]
    assert [(i, run[i].metrics(), run[i].learner().params.keys(), last[i]) for i in range(3)] == watch.SEEN
    assert digests(run.path) == digests(copy_tiny_run(tmp_path / "as it is without"))


def test_a_function_that_fails_is_not_called_again_and_the_training_continues(watch, tiny_config, tmp_path, caplog):
    run = metaloom.train(tiny_config(), tmp_path / "run", log=["my_watch:fail"], progress=False)
    assert (watch.SEEN, len(run)) == ([0], 3)
    assert "my_watch:fail stopped logging this run, which continues: RuntimeError: of a function" in caplog.text


def asked_of(proxy):
    """First lines of what was asked of the proxy until now that is not on this machine.

    What earlier tests left running, such as Prefect's log worker, asks a server here, at any moment.
    """
    lines = []
    while True:
        try:
            connection, _ = proxy.accept()
        except BlockingIOError:
            return [line for line in lines if line and "127.0.0.1:" not in line]
        with connection:
            connection.settimeout(60)
            lines.append(connection.recv(4096).partition(b"\r\n")[0].decode())


def test_nobody_elsewhere_is_called(logged, proxy):
    """Every request that respects a proxy, as all of these libraries do, would have been seen here."""
    assert asked_of(proxy) == []
    with contextlib.suppress(OSError):
        requests.get(
            "https://example.org", timeout=0.5, proxies={"https": f"http://127.0.0.1:{proxy.getsockname()[1]}"}
        )
    assert [line.split()[:2] for line in asked_of(proxy)] == [["CONNECT", "example.org:443"]]


@pytest.mark.parametrize("parallel", ["1", "2"])
def test_every_run_of_a_sweep_is_logged(tmp_path, tiny_config, monkeypatch, parallel, pytestconfig):
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
    # Processes that are started import this file by its name, from the project's root.
    monkeypatch.setattr("sys.path", [*sys.path, str(pytestconfig.rootpath)])
    settings = tmp_path / "settings.json"
    settings.write_text(tiny_config(iterations=2).model_dump_json())
    words = ["sweep", str(settings), "--name", "both", "--seeds", "2", "--parallel", parallel, "--workers", "0"]
    assert cli.run([*words, "--film-every", "1"]) == 2
    assert not (tmp_path / "sweeps").exists()
    assert cli.run([*words, "--log", "tensorboard"]) == 0
    for seed in (7, 8):
        name = f"both-seed-{seed}"
        events = events_of(tmp_path / "logs" / "tensorboard" / name)
        stored = storage.open_run(tmp_path / name).metrics()["step_1.average_return"].to_pylist()
        scalars = [event.value for event in events.Scalars("step_1/average_return")]
        np.testing.assert_allclose(scalars, stored, rtol=1e-6)


def test_speed_is_among_the_timings_where_steps_were_sampled():
    of = partial(SimpleNamespace, stage_seconds={"adapt": 2.0})
    assert timings(of(steps_per_second=None)) == {"time/adapt": 2.0}
    assert timings(of(steps_per_second=5.0)) == {"time/adapt": 2.0, "time/steps_per_second": 5.0}
