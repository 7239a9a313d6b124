"""Prefect's database under `metaloom serve`: thousands of task runs, and a database that is killed or removed."""

import logging
import os
import signal
import tempfile
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from postgres import Postgres, running_postgres
from prefect_server import PROGRAMS, Served, iterations_of, serving, wait_for

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.run import RunConfig

pytestmark = [pytest.mark.prefect, pytest.mark.sweep]

log = logging.getLogger(__name__)

ITERATIONS = 500
TASK_RUNS = 7 * ITERATIONS + 1


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    with tempfile.TemporaryDirectory() as folder, running_postgres(Path(folder) / "data") as server:
        yield server


def answers_from_database(served: Served) -> bool:
    with suppress(urllib.error.HTTPError):
        return served.ask("flow_runs/count") > 0
    return False


def log_of(served: Served) -> str:
    return (served.folder / ".prefect" / "server.log").read_text()


def trained(served: Served, config: RunConfig, run: str) -> dict[str, Any]:
    return served.finished("meta-train-custom", run=run, workers=0, config=config.model_dump(mode="json"), seconds=600)


def require_all_completed(served: Served, config: RunConfig) -> None:
    ended = trained(served, config, "long")
    assert ended["state"]["type"] == "COMPLETED"
    asked = {"flow_runs": {"id": {"any_": [ended["id"]]}}, "task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    wait_for(lambda: served.ask("task_runs/count", **asked) == TASK_RUNS, "every task run is recorded")
    assert "locked" not in log_of(served)
    assert "Traceback" not in log_of(served)


def test_thousands_of_task_runs_with_sqlite(tmp_path, tiny_config: Callable[..., RunConfig]):
    (tmp_path / "served").mkdir()
    with serving(PROGRAMS, tmp_path / "served", tmp_path / "log") as served:
        require_all_completed(served, tiny_config(iterations=ITERATIONS))


def test_thousands_of_task_runs_with_postgresql(postgres, tmp_path, tiny_config: Callable[..., RunConfig]):
    (tmp_path / "served").mkdir()
    with serving(PROGRAMS, tmp_path / "served", tmp_path / "log", "--database", postgres.url) as served:
        require_all_completed(served, tiny_config(iterations=ITERATIONS))
        assert not [*(served.folder / ".prefect").glob("*.db")]


def test_a_training_outlives_its_database(postgres, tmp_path, tiny_config: Callable[..., RunConfig], digests):
    (tmp_path / "served").mkdir()
    config = tiny_config(iterations=100)
    with serving(PROGRAMS, tmp_path / "served", tmp_path / "log", "--database", postgres.url) as served:
        id = served.start("meta-train-custom", run="first", workers=0, config=config.model_dump(mode="json"))
        folder = served.folder / "runs" / "first"
        wait_for(lambda: iterations_of(folder) > 2, "it trains")
        os.kill(postgres.pid, signal.SIGKILL)
        stored = iterations_of(folder)
        wait_for(lambda: iterations_of(folder) > stored + 5, "it trains without the database")
        postgres.start()
        began = time.monotonic()
        wait_for(lambda: answers_from_database(served), "the server has its database")
        log.info("the server has its database again %.1f s after it was started", time.monotonic() - began)

        def state() -> str:
            (found,) = served.ask("flow_runs/filter", flow_runs={"id": {"any_": [id]}})
            return found["state"]["type"]

        wait_for(lambda: state() == "COMPLETED", "the flow run has gone on to its end")
        assert storage.verify_run(folder) == []
    alone = train(config, tmp_path / "alone", backend=Backend(workers=0))
    assert digests(folder) == digests(alone.path)


def test_a_database_that_is_removed_ends_serve_behind_a_stage_and_costs_no_run(
    tmp_path, tiny_config: Callable[..., RunConfig], digests
):
    folder = tmp_path / "served"
    run, config = folder / "runs" / "first", tiny_config(iterations=100)
    folder.mkdir()
    last_words = f"continue with: metaloom resume {run}\n"
    with serving(PROGRAMS, folder, tmp_path / "log", stopped_by=None) as served:
        served.start("meta-train-custom", run="first", workers=0, config=config.model_dump(mode="json"))
        wait_for(lambda: iterations_of(run) > 2, "it trains")
        for file in (folder / ".prefect").glob("prefect.db*"):
            file.unlink()
    assert served.log.read_text().endswith(last_words)
    assert f"{folder}/.prefect/prefect.db was removed" in served.log.read_text()
    assert storage.verify_run(run) == []
    with serving(PROGRAMS, folder, tmp_path / "log") as served:
        assert served.finished("meta-train", run="first", workers=0)["state"]["type"] == "COMPLETED"
    assert digests(run) == digests(train(config, tmp_path / "alone", backend=Backend(workers=0)).path)
