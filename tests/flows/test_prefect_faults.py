"""Under `metaloom serve`: what of the workers dies in mid-run, and schedules that fire at once. Nobody helps.

`pytest --log-cli-level=INFO` shows the seconds that each of them cost.
"""

import json
import logging
import signal
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kept_cluster import kept_cluster
from prefect_server import PROGRAMS, Served, iterations_of, part_of, serving, wait_for

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.prefect_app.flow_process import MODULE
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.run import RunConfig

pytestmark = [pytest.mark.prefect, pytest.mark.sweep]

log = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with serving(PROGRAMS, tmp_path_factory.mktemp("served"), log) as served:
        yield served


@pytest.fixture
def config(tiny_config: Callable[..., RunConfig]) -> RunConfig:
    """Rounds long enough to die in."""
    sizes = dict(num_tasks=8, episodes_per_task=10, max_episode_steps=100)
    return tiny_config(env="half-cheetah-dir", iterations=12, **sizes)


def test_a_training_outlives_the_scheduler_of_its_workers(served, config, digests):
    with kept_cluster(workers=2) as cluster:
        ended = _trained_in_spite_of(cluster.scheduler.kill, served, "unscheduled", config, scheduler=cluster.address)
        assert (cluster.scheduler.starts, ended["run_count"]) == (2, 1)
    _require_equal(served, "unscheduled", config, digests)


def test_a_training_outlives_a_worker_of_another_scheduler(served, config, digests):
    with kept_cluster(workers=2) as cluster:
        ended = _trained_in_spite_of(cluster.workers[0].kill, served, "left", config, scheduler=cluster.address)
        assert (cluster.workers[0].starts, ended["run_count"]) == (2, 1)
    _require_equal(served, "left", config, digests)


def test_a_training_outlives_a_worker_of_its_own(served, config, digests):
    def kill() -> None:
        children = part_of(served, MODULE).children(recursive=True)
        workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        max(workers, key=lambda process: sum(process.cpu_times()[:2])).kill()

    assert _trained_in_spite_of(kill, served, "worked", config, workers=2)["run_count"] == 1
    _require_equal(served, "worked", config, digests)


@pytest.mark.parametrize("ended", ["stopped", "metaloom.flows.prefect_app.server", "worker"])
def test_a_training_goes_on_when_a_service_that_was_stopped_or_lost_a_part_is_started_again(
    tmp_path, tiny_config: Callable[..., RunConfig], digests, ended
):
    config, folder = tiny_config(iterations=60), tmp_path / "served"
    folder.mkdir()
    stopped_by = signal.SIGTERM if ended == "stopped" else None
    with serving(PROGRAMS, folder, tmp_path / "log", stopped_by=stopped_by) as served:
        id = served.start("meta-train-custom", run="first", workers=0, config=config.model_dump(mode="json"))
        wait_for(lambda: iterations_of(folder / "runs" / "first") > 2, "it trains")
        if ended != "stopped":
            part_of(served, ended).kill()
    assert ("ended (killed by SIGKILL), and so did `metaloom serve`" in served.log.read_text()) == (ended != "stopped")
    assert iterations_of(folder / "runs" / "first") < 60
    with serving(PROGRAMS, folder, tmp_path / "log") as served:
        wait_for(lambda: _flow_run(served, id)["state"]["type"] == "COMPLETED", "it goes on to its end")
    _require_equal(served, "first", config, digests)


def test_a_schedule_is_made_by_the_command(served):
    typed = ("deployment", "schedule", "create", "meta-train/meta-train", "--cron", "0 22 * * *")
    made = served.prefect(*typed, "--timezone", "Europe/Zurich")
    assert made.returncode == 0, made.stdout + made.stderr
    told = served.prefect("deployment", "inspect", "meta-train/meta-train", "--output", "json")
    (schedule,) = json.loads(told.stdout)["schedules"]
    assert schedule["schedule"]["cron"] == "0 22 * * *"


def test_schedules_fire_by_themselves_and_wait_for_each_other(served, tiny_config: Callable[..., RunConfig]):
    schedules = {
        "cron": {"cron": "* * * * *", "timezone": "Europe/Zurich"},
        "interval": {"interval": 20.0, "anchor_date": "2026-01-01T00:00:00+00:00"},
    }
    (deployment,) = served.ask("deployments/filter", deployments={"name": {"any_": ["meta-train-custom"]}})
    config = tiny_config(iterations=40).model_dump(mode="json")
    parameters = {"config": config, "workers": 0}
    made = [
        {"schedule": schedule, "active": True, "slug": slug, "parameters": parameters}
        for slug, schedule in schedules.items()
    ]
    served.tell(f"deployments/{deployment['id']}/schedules", made)

    def fired(state: str) -> list[dict[str, Any]]:
        named = {"state": {"type": {"any_": [state]}}, "deployment_id": {"any_": [deployment["id"]]}}
        return [run for run in served.ask("flow_runs/filter", flow_runs=named) if run["auto_scheduled"]]

    def slugs(runs: list[dict[str, Any]]) -> set[str]:
        return {run["created_by"]["display_value"] for run in runs}

    wait_for(lambda: len(slugs(fired("COMPLETED"))) == 2, "both schedules have fired and run", seconds=400)
    times = sorted((_time(run["start_time"]), _time(run["end_time"])) for run in fired("COMPLETED"))
    assert all(end <= start for (_, end), (start, _) in pairwise(times)), "one at a time"
    (queue,) = served.ask("work_queues/filter", work_queues={"name": {"any_": ["training"]}})
    served.tell(f"work_queues/{queue['id']}", {"concurrency_limit": 2}, method="PATCH")
    wait_for(lambda: len(fired("RUNNING")) == 2, "two run at once where two may")
    for schedule in served.tell(f"deployments/{deployment['id']}/schedules", method="GET"):
        served.tell(f"deployments/{deployment['id']}/schedules/{schedule['id']}", method="DELETE")


def _trained_in_spite_of(
    act: Callable[[], None], served: Served, name: str, config: RunConfig, **where: Any
) -> dict[str, Any]:
    """Train, act in the middle of a round, tell the seconds until the next stage, and return the flow run's end."""
    id = served.start("meta-train-custom", run=name, config=config.model_dump(mode="json"), **where)
    folder = served.folder / "runs" / name
    wait_for(lambda: len(_stored(folder)) > 16 and _stored(folder)[-1].stage == "adapt", "it trains")
    stored, began = len(_stored(folder)), time.monotonic()
    time.sleep(0.3)
    act()
    wait_for(lambda: len(_stored(folder)) > stored, "it goes on")
    log.info("%s: the round that was disturbed took %.1f s", name, time.monotonic() - began)

    wait_for(
        lambda: _flow_run(served, id)["state"]["type"] == "COMPLETED",
        "the flow run has gone on to its end",
        seconds=300,
    )
    rounds = [ref for ref in _stored(folder) if ref.stage == "collect_rollouts"]
    seconds = sorted(storage.open_run(folder).record(ref).seconds for ref in rounds)
    log.info("%s: others %.1f s", name, seconds[len(seconds) // 2])
    return _flow_run(served, id)


def _flow_run(served: Served, id: str) -> dict[str, Any]:
    (found,) = served.ask("flow_runs/filter", flow_runs={"id": {"any_": [id]}})
    return found


def _require_equal(served: Served, name: str, config: RunConfig, digests: Callable[[Path], dict[str, str]]) -> None:
    folder = served.folder / "runs" / name
    alone = train(config, served.folder / f"{name}-alone", backend=Backend(workers=0))
    assert digests(folder) == digests(alone.path)
    assert storage.verify_run(folder) == []


def _stored(folder: Path) -> list[storage.StageRef]:
    return storage.open_run(folder).refs() if (folder / "run.json").exists() else []


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
