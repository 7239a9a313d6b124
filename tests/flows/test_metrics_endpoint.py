"""The page that Prometheus reads of a training, and the dashboard that shows it."""

import errno
import json
import re
import socket
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.errors import UsageError
from metaloom.flows.metrics_endpoint import TrainingMetrics, metrics_at
from metaloom.flows.observer import IterationReport, Observer
from metaloom.flows.rollouts.backend import Traffic
from metaloom.flows.views import progress
from metaloom.storage import StageRef

DASHBOARD = Path(__file__).parents[2] / "docs" / "lab" / "grafana_dashboard.json"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read(port):
    """Values of a page by name and labels, in the order of their names, without the run's."""
    page = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=120)
    page.raise_for_status()
    samples = [s for family in text_string_to_metric_families(page.text) for s in family.samples]
    assert {sample.labels["run"] for sample in samples} <= {"first"}
    return {(s.name, *(v for k, v in sorted(s.labels.items()) if k != "run")): s.value for s in samples}


def report(iteration, *, steps=0, seconds=None, metrics=None, traffic=None):
    return IterationReport(
        iteration=iteration,
        iterations=5,
        metrics=metrics or {},
        stage_seconds=seconds or {},
        elapsed_seconds=1.0,
        steps_per_second=None,
        steps=steps,
        traffic=traffic,
    )


@pytest.fixture
def settings(tmp_path, tiny_config):
    file = tmp_path / "settings.json"
    evaluation = {"every": 2, "num_tasks": 2, "episodes": 1, "test_episodes": 1}
    file.write_text(tiny_config(iterations=2, evaluation=evaluation).model_dump_json())
    return str(file)


@pytest.mark.dask
def test_a_training_can_be_read_while_it_goes_on_and_so_can_its_resumption(settings, tmp_path, monkeypatch):
    pages, port = [], free_port()

    @contextmanager
    def reading(**options):
        yield Observer(iteration_done=lambda report: pages.append(read(port)))

    monkeypatch.setattr(progress, "progress", reading)
    path, option = tmp_path / "first", ("--metrics-port", str(port))
    assert cli.run(["train", settings, "--run", str(path), "--workers", "1", *option]) == 0
    with pytest.raises(requests.ConnectionError):
        read(port)
    assert cli.run(["resume", str(path), "--iterations", "3", "--workers", "0", *option]) == 0

    run = storage.open_run(path)
    updates = [run.load(StageRef(i, "meta_optimize")) for i in range(3)]
    for iteration, page in enumerate(pages):
        assert page["metaloom_iterations_done",] == iteration + 1
        assert page["metaloom_iterations_planned",] == (2, 2, 3)[iteration]
        # Two rounds of four tasks of three episodes of ten steps; the resumption counts its own.
        rounds = (1, 2, 1)[iteration]
        assert page["metaloom_environment_steps_total",] == rounds * 2 * 4 * 3 * 10
        for step in (0, 1):
            earned = updates[iteration].metrics[f"step_{step}.average_return"]
            assert page["metaloom_metric", f"step_{step}/average_return"] == earned
            assert page["metaloom_stage_seconds_total", "collect_rollouts", str(step)] > 0
    # The second iteration alone is evaluated.
    (evaluated,) = (run.load(ref) for ref in run.refs() if ref.stage == "evaluate" and ref.iteration == 1)
    for k, mean in enumerate(evaluated.test_returns.mean(axis=(0, 2))):
        assert pages[1]["metaloom_metric", f"evaluation/after_{k}_steps"] == mean
    assert not any("evaluation" in name for key in pages[0] for name in key)
    # A round of four tasks is four shards.
    assert pages[0]["metaloom_shards_total", "first"] == 8
    assert [page.get(("metaloom_worker_threads",)) for page in pages] == [1, 1, None]
    assert pages[1]["metaloom_worker_bytes_total", "received"] > pages[0]["metaloom_worker_bytes_total", "received"] > 0


def test_counters_add_up_what_iterations_report_and_traffic_is_told_as_totals():
    metrics = TrainingMetrics("first")
    metrics.iteration_done(report(0, steps=7, seconds={"adapt.1": 0.5}, traffic=Traffic(5, 1, 100, 300, 2)))
    metrics.iteration_done(report(1, steps=4, seconds={"adapt.1": 0.25}, traffic=Traffic(9, 3, 150, 500, 4)))
    value = metrics.registry.get_sample_value
    first = {"run": "first"}
    assert value("metaloom_environment_steps_total", first) == 11
    assert value("metaloom_stage_seconds_total", {**first, "stage": "adapt", "step": "1"}) == 0.75
    assert value("metaloom_shards_total", {**first, "attempt": "first"}) == 6
    assert value("metaloom_shards_total", {**first, "attempt": "again"}) == 3
    assert value("metaloom_worker_bytes_total", {**first, "direction": "sent"}) == 150
    assert value("metaloom_worker_bytes_total", {**first, "direction": "received"}) == 500
    assert value("metaloom_worker_threads", first) == 4


def test_one_stage_is_shown_as_running():
    metrics = TrainingMetrics("first")
    for stage in ("adapt", "collect_rollouts", "adapt"):
        metrics.stage_started(StageRef(0, stage))
    shown = {
        s: metrics.registry.get_sample_value("metaloom_stage_running", {"run": "first", "stage": s})
        for s in ("adapt", "collect_rollouts")
    }
    assert shown == {"adapt": 1, "collect_rollouts": 0}


def test_a_port_that_is_taken_is_told_before_anything_is_made(settings, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.run(["train", settings, "--run", str(tmp_path / "first"), "--metrics-port", str(port)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"--metrics-port {port} cannot be opened (Address already in use)" in told
    assert not (tmp_path / "first").exists()


@pytest.mark.parametrize("port", [-1, 0, 65536])
def test_a_port_that_there_is_not_is_refused(port):
    with (
        pytest.raises(UsageError, match=f"--metrics-port must be between 1 and 65535, got {port}"),
        metrics_at(port, "first", Observer()),
    ):
        pass


@pytest.mark.parametrize("port", [1, 65535])
def test_the_first_and_the_last_port_may_be_asked_for(port, monkeypatch):
    def refuse(*_, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("metaloom.flows.metrics_endpoint.start_http_server", refuse)
    with (
        pytest.raises(UsageError, match=rf"--metrics-port {port} cannot be opened \(Permission denied\)"),
        metrics_at(port, "first", Observer()),
    ):
        pass


def test_other_machines_cannot_reach_it():
    port = free_port()
    with metrics_at(port, "first", Observer()), socket.socket() as other:
        # Whoever listens on all addresses has this one too.
        other.bind(("127.0.0.2", port))


def test_pages_of_other_hosts_that_lead_here_are_refused():
    with metrics_at(port := free_port(), "first", Observer()) as observer:
        observer.stage_started(StageRef(0, "adapt"))
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", "LOCALHOST:9"):
            page = requests.get(f"http://127.0.0.1:{port}/metrics", headers={"Host": host}, timeout=120)
            assert page.status_code == 200
            assert "metaloom_stage_running" in page.text
        for host in (
            f"rebound.example:{port}",
            "rebound.example",
            "127.0.0.1.example",
            "127.0.0.1,rebound.example",
            "[",
        ):
            page = requests.get(f"http://127.0.0.1:{port}/metrics", headers={"Host": host}, timeout=120)
            assert page.status_code == 421
            assert page.text == "the host must be 127.0.0.1 or localhost\n"


def test_the_dashboard_shows_every_metric_and_no_other_by_labels_that_it_has():
    metrics = TrainingMetrics("first")
    metrics.stage_started(StageRef(0, "adapt", 1))
    metrics.iteration_done(report(0, seconds={"adapt.1": 0.5}, metrics={"kl": 0.1}, traffic=Traffic()))
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    labels = {sample.name: {*sample.labels} for sample in samples if not sample.name.endswith("_created")}
    shown = set()
    for panel in json.loads(DASHBOARD.read_text("utf-8"))["panels"]:
        for target in panel["targets"]:
            (name,) = re.findall(r"metaloom_\w+", target["expr"])
            shown.add(name)
            used = {*re.findall(r"(\w+)=~", target["expr"]), *re.findall(r"{{(\w+)}}", target["legendFormat"])}
            assert "run" in used <= labels[name], target
    assert shown == {*labels}
