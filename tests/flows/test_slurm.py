"""docs/lab/slurm.sh on a real Slurm: submitted once, it trains over several time limits."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from prefect_server import iterations_of, wait_for
from slurm import Slurm, running_slurm

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.settings import settings_file
from metaloom.pipeline.config.run import RunConfig

pytestmark = [pytest.mark.dask, pytest.mark.sweep]

SCRIPT = Path(__file__).parents[2] / "docs" / "lab" / "slurm.sh"


@pytest.fixture
def slurm(monkeypatch) -> Iterator[Slurm]:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    # Of a short name, because sockets have one; of a name with nothing to escape, because Slurm reads it.
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, running_slurm(Path(folder)) as cluster:
        yield cluster


def require_more_iterations(folder: Path) -> None:
    stored = iterations_of(folder)
    wait_for(lambda: iterations_of(folder) > stored + 2, "it trains", seconds=180)


def require_restarts(slurm: Slurm, job: str, restarts: str) -> None:
    wait_for(lambda: slurm.state(job)["Restarts"] == restarts, "it is queued again", seconds=60)
    while slurm.state(job)["JobState"] == "PENDING":
        # A job that is queued again waits for two minutes.
        slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
        time.sleep(0.5)


def kill_scheduler(folder: Path) -> None:
    """Kill the job's scheduler, which the job starts again, and its workers, which end with it."""
    (scheduler,) = [pid for pid in left_behind(folder) if "scheduler" in psutil.Process(pid).cmdline()]
    os.kill(scheduler, signal.SIGKILL)


def left_behind(folder: Path) -> list[int]:
    """Processes that name a file in a folder."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or ())
    ]


def test_a_job_is_queued_again_at_its_time_limit_and_resumes_and_outlives_its_scheduler(
    slurm, tmp_path, tiny_config: Callable[..., RunConfig], digests
):
    config = tiny_config(iterations=60)
    (tmp_path / "mine.toml").write_text(settings_file(config, "toml"))
    log, folder = tmp_path / "job.log", tmp_path / "runs" / "first"
    told = slurm("sbatch", f"--output={log}", SCRIPT, "mine.toml", "first", folder=tmp_path)
    job = told.split()[-1]
    for restarts in ("1", "2"):
        require_more_iterations(folder)
        # What Slurm sends half a minute before the limit, which it looks at every half minute only.
        slurm("scancel", "--batch", "--signal=USR1", job)
        require_restarts(slurm, job, restarts)
    require_more_iterations(folder)
    kill_scheduler(tmp_path)
    require_more_iterations(folder)
    assert slurm.state(job)["Restarts"] == "2"
    wait_for(lambda: slurm.state(job)["JobState"] not in ("RUNNING", "PENDING", "COMPLETING"), "it ends", seconds=300)
    assert slurm.state(job)["JobState"] == "COMPLETED", log.read_text()
    assert slurm.state(job)["Restarts"] == "2"
    assert storage.verify_run(folder) == []
    assert not [*tmp_path.glob(".metaloom-job-*")]
    wait_for(lambda: not left_behind(tmp_path), "its schedulers and workers end", seconds=30)
    alone = train(config, tmp_path / "alone", backend=Backend(workers=0))
    assert digests(folder) == digests(alone.path)
