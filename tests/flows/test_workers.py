"""Equal bits wherever rollouts run: threads of one process, and a scheduler with workers of its own."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Barrier

import numpy as np
import psutil
import pytest
from distributed import default_client

import metaloom.flows.rollouts.connection
import metaloom.flows.rollouts.dask
from metaloom import storage
from metaloom.flows.commands.train import resume, train
from metaloom.flows.errors import WorkersError
from metaloom.flows.graph.run_stages import rollout_workers
from metaloom.flows.observer import Observer
from metaloom.flows.rollouts.supervised import fingerprint, require_own_versions
from metaloom.flows.rollouts.workers import Backend, LocalWorkers, SamplerSpec, collect_shard, usable_cores
from metaloom.pipeline.building import build_learner
from metaloom.pipeline.config.sources import digest_of
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.tasks.samplers import draw_tasks
from metaloom.stages.collect_rollouts import RolloutPosition
from metaloom.storage import StageRef

pytestmark = pytest.mark.usefixtures("warm")

PROJECT = Path(metaloom.flows.rollouts.dask.__file__).parents[1]


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ({"workers": -1}, "workers=-1"),
        ({"workers": 0, "threads": 0}, "threads=0"),
        ({"workers": 2, "threads": 2}, "threads=2 with Dask workers"),
        ({"workers": 2, "scheduler": "tcp://127.0.0.1:1"}, "use only one of them"),
        ({"scheduler": "tcp://127.0.0.1:1", "threads": 2}, "threads=2 with Dask workers"),
        ({"step_timeout_seconds": 0.0}, "must be a finite number above 0 and .* got 0.0 and None"),
        ({"step_timeout_seconds": float("nan")}, "must be a finite number above 0 and .* got nan and None"),
        ({"retries": -1}, "retries at least 0, got None and -1"),
        ({"workers": 0, "step_timeout_seconds": 5.0}, "step_timeout_seconds=5.0 .* without worker processes"),
        ({"workers": 0, "retries": 0}, "retries=0 without worker processes"),
        ({"scheduler": "tcp://127.0.0.1:1", "retries": 1}, "ALLOWED_FAILURES=1"),
    ],
)
def test_places_that_contradict_each_other_are_refused(backend, message):
    with pytest.raises(ValueError, match=message):
        Backend(**backend)


@pytest.mark.parametrize(
    ("backend", "num_tasks", "workers"),
    [
        ({}, 2, 2),
        ({}, 1, 0),
        ({"step_timeout_seconds": 5.0}, 1, 2),
        ({"retries": 0}, 1, 2),
        ({"workers": 3}, 1, 3),
        ({"scheduler": "tcp://127.0.0.1:1"}, 1, None),
        ({"scheduler": "tcp://127.0.0.1:1"}, 40, None),
    ],
)
def test_two_worker_processes_are_the_default_but_a_run_of_one_task_needs_none(backend, num_tasks, workers):
    assert Backend(**backend).for_tasks(num_tasks).workers == workers


def test_a_run_of_one_task_is_sampled_in_this_process(tiny_config):
    with rollout_workers(tiny_config(num_tasks=1), Backend()) as workers:
        assert isinstance(workers, LocalWorkers)


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ({}, "2 Dask worker processes"),
        ({"workers": 3}, "3 Dask worker processes"),
        ({"scheduler": "tcp://127.0.0.1:1"}, "Dask scheduler tcp://127.0.0.1:1"),
        ({"workers": 0}, "this process, 1 physics thread"),
        ({"workers": 0, "threads": 2}, "this process, 2 physics threads"),
    ],
)
def test_a_backend_says_where_rollouts_run(backend, words):
    assert str(Backend(**backend)) == words


def test_cores_are_those_that_this_process_may_use(monkeypatch):
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert usable_cores() == len(allowed)
    monkeypatch.delattr(os, "sched_getaffinity")
    for found, cores in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda found=found: found)
        assert usable_cores() == cores


def test_work_is_watched_for_a_minute_and_tried_four_times_unless_told_otherwise():
    assert (Backend().for_tasks(2).step_timeout_seconds, Backend().for_tasks(2).retries) == (60.0, 3)
    given = Backend(step_timeout_seconds=0.5, retries=0).for_tasks(2)
    assert (given.step_timeout_seconds, given.retries) == (0.5, 0)


def test_two_threads_of_one_process_do_not_share_a_simulator(tiny_config):
    config = tiny_config(env="half-cheetah-dir", max_episode_steps=50)
    spec, env = SamplerSpec.of(config, threads=1), make_env(config.env)
    _, learner, _ = build_learner(config)
    params = learner.acting_params(learner.initialize(run_seed=1), config.num_tasks)
    tasks = draw_tasks(env, num_tasks=config.num_tasks, run_seed=1, iteration=0)

    def collect(iteration: int) -> np.ndarray:
        return collect_shard(spec, params, tasks, RolloutPosition(1, iteration, 0)).rewards

    def collect_at_once(iteration: int) -> np.ndarray:
        together.wait()
        return collect(iteration)

    alone = [collect(iteration) for iteration in range(4)]
    together = Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        shared = list(pool.map(collect_at_once, range(4)))
    for expected, found in zip(alone, shared, strict=True):
        assert np.array_equal(expected, found)


def test_what_was_printed_before_standard_output_is_another_stays_there_in_order():
    printing = "print('one'); keep_streams(); print('two'); print_to_errors(); print('three')"
    unbuffered = "os.write(2, b'four\\n'); print('five', file=sys.stderr); os.write(2, b'six\\n')"
    program = f"import os, sys; from metaloom.flows.streams import *; {printing}; {unbuffered}"
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=buffered)
    assert (ended.stdout, ended.stderr) == ("one\ntwo\n", "three\nfour\nfive\nsix\n")


@pytest.mark.dask
@pytest.mark.slow
def test_workers_of_a_scheduler_that_spill_all_results_to_their_disk_give_the_digests_of_this_process(
    tmp_path, tiny_config, digests, monkeypatch
):
    config = tiny_config(env="half-cheetah-dir", max_episode_steps=20)
    train(config, tmp_path / "here", backend=Backend(workers=0))
    monkeypatch.setenv("DASK_TEMPORARY_DIRECTORY", str(tmp_path / "dask"))
    monkeypatch.setenv("DASK_DISTRIBUTED__WORKER__MEMORY__TARGET", "1e-9")
    spilled = set[Path]()
    fetched_directly = set[bool]()

    def look(_ref: StageRef) -> None:
        spilled.update((tmp_path / "dask").glob("*/*/storage/*"))
        fetched_directly.add(default_client().direct_to_workers)

    with cluster(PROJECT, threads=2) as address:
        train(config, tmp_path / "there", backend=Backend(scheduler=address), observer=Observer(stage_started=look))
    assert spilled
    assert fetched_directly == {True}  # not by way of the scheduler
    assert digests(tmp_path / "there") == digests(tmp_path / "here")


@pytest.mark.dask
@pytest.mark.slow
def test_workers_that_cannot_compute_the_same_are_refused_before_anything_is_created(
    tmp_path, tiny_config, monkeypatch
):
    (tmp_path / "only_here.py").write_text("from gymnasium.envs.classic_control import PendulumEnv as Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    with cluster(PROJECT, threads=1) as address:
        backend = Backend(scheduler=address)
        with pytest.raises((ConnectionError, ValueError), match="only_here"):
            train(tiny_config(env="only_here:Mine"), tmp_path / "run", backend=backend)
        monkeypatch.setattr(
            metaloom.flows.rollouts.connection, "fingerprint", lambda spec: {"metaloom's code": "another vers"}
        )
        with pytest.raises(ConnectionError, match=r"metaloom's code .* there, another vers here"):
            train(tiny_config(), tmp_path / "run", backend=backend)
    assert not (tmp_path / "run").exists()


@pytest.mark.dask
@pytest.mark.slow
def test_workers_with_another_source_of_an_environment_are_refused_also_where_it_has_changed_since_they_know_it(
    tmp_path, tiny_config, monkeypatch, digests
):
    source = "from metaloom.pipeline.envs.point_corner import PointCorner\n\nclass Mine(PointCorner):\n    {}\n"
    file = tmp_path / "own_env_of_workers.py"
    file.write_text(source.format("max_action = 0.2"))
    monkeypatch.syspath_prepend(tmp_path)
    config = tiny_config(env="own_env_of_workers:Mine")
    with cluster(tmp_path, threads=1) as address:
        backend = Backend(scheduler=address)
        train(config, tmp_path / "first", backend=backend)
        # The worker has imported the old source. The new one has another size, because Python would use the cached code
        # of a source with the same size that was written in the same second.
        file.write_text(source.format("max_action = 0.15"))
        importlib.reload(sys.modules["own_env_of_workers"])
        with pytest.raises(ConnectionError, match=r"the source of own_env_of_workers:Mine \w+ there, \w+ here"):
            train(config, tmp_path / "second", backend=backend)
    assert not (tmp_path / "second").exists()
    file.write_text(source.format("max_action = 0.2"))
    importlib.reload(sys.modules["own_env_of_workers"])
    train(config, tmp_path / "here", backend=Backend(workers=0))
    assert digests(tmp_path / "first") == digests(tmp_path / "here")


@pytest.mark.dask
@pytest.mark.slow
def test_a_worker_process_of_the_trainer_that_is_started_again_after_its_source_has_changed_is_refused(
    tmp_path, tiny_config, monkeypatch
):
    source = "from metaloom.pipeline.envs.point_corner import PointCorner\n\nclass Mine(PointCorner):\n    {}\n"
    file = tmp_path / "own_env_edited.py"
    file.write_text(source.format("max_action = 0.2"))
    monkeypatch.syspath_prepend(tmp_path)
    before = {*psutil.Process().children(recursive=True)}

    def edit(ref):
        if ref == StageRef(1, "collect_rollouts"):
            file.write_text(source.format("max_action = 0.1"))
            for process in {*psutil.Process().children(recursive=True)} - before:
                if "spawn_main" in " ".join(process.cmdline()):
                    process.kill()

    config = tiny_config(env="own_env_edited:Mine", iterations=2)
    with pytest.raises(WorkersError, match=r"the source of own_env_edited:Mine \w+ there, \w+ here"):
        train(config, tmp_path / "run", backend=Backend(workers=1), observer=Observer(stage_started=edit))
    assert len(storage.open_run(tmp_path / "run")) == 1


def test_a_worker_tells_the_source_that_it_imported_though_it_did_for_another_plug_in(
    tmp_path, tiny_config, monkeypatch
):
    env = "from metaloom.pipeline.envs.point_corner import PointCorner\nfrom own_gain import GAIN\n\n{}"
    for name in ("own_first", "own_second"):
        source = f"class Mine(PointCorner):\n    max_action = GAIN  # {name}\n"
        (tmp_path / f"{name}.py").write_text(env.format(source))
    gain = tmp_path / "own_gain.py"
    gain.write_text("GAIN = 0.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    first, second = (SamplerSpec.of(tiny_config(env=f"own_{name}:Mine"), 1) for name in ("first", "second"))
    require_own_versions(fingerprint(first), first)
    gain.write_text("GAIN = 0.1\n")  # this process, the worker, goes on with 0.2; the trainer is another one
    of_trainer = {"the source of own_gain": digest_of(gain)[:12]}
    with pytest.raises(WorkersError, match=r"the source of own_gain \w{12} there, \w{12} here"):
        require_own_versions(of_trainer, second)
    with pytest.raises(WorkersError, match=r"metaloom's code \w{12} there, other here"):
        require_own_versions({"metaloom's code": "other"}, second)


@pytest.mark.dask
@pytest.mark.slow
def test_a_scheduler_that_does_not_answer_is_reported_before_anything_is_created(tmp_path, tiny_config, monkeypatch):
    monkeypatch.setattr(metaloom.flows.rollouts.connection, "_ANSWER_SECONDS", 0.5)
    with pytest.raises(ConnectionError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9"):
        train(tiny_config(), tmp_path / "run", backend=Backend(scheduler="tcp://127.0.0.1:9"))
    assert not (tmp_path / "run").exists()


@pytest.mark.dask
@pytest.mark.slow
def test_local_workers_listen_on_this_machine_only_and_ignore_ctrl_c_and_hang_ups(tiny_config):
    before = _deaf_to(os.getpid())
    with rollout_workers(tiny_config(), Backend(workers=2)):
        children = psutil.Process().children(recursive=True)
        family = [psutil.Process(), *children]
        listening = [c.laddr.ip for p in family for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
        workers = [p for p in children if "spawn_main" in " ".join(p.cmdline())]
        assert [_deaf_to(p.pid) >= {signal.SIGINT, signal.SIGHUP} for p in workers] == [True, True]
    assert len(listening) >= 3, "a scheduler and two workers listen"
    assert set(listening) == {"127.0.0.1"}
    assert _deaf_to(os.getpid()) == before


@pytest.mark.dask
@pytest.mark.slow
def test_ctrl_c_while_workers_start_stops_in_order_and_leaves_a_run_that_can_be_resumed(tmp_path, tiny_config):
    settings = tmp_path / "settings.json"
    settings.write_text(tiny_config().model_dump_json())
    command = [sys.executable, "-m", "metaloom.flows.cli", "train", str(settings), "--run", str(tmp_path / "run")]
    # A process group of its own, which the signal reaches as a whole, as in a terminal.
    trainer = subprocess.Popen(command, text=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
    try:
        while not any("spawn_main" in " ".join(p.cmdline()) for p in psutil.Process(trainer.pid).children()):
            assert trainer.poll() is None
            time.sleep(0.01)
        os.killpg(trainer.pid, signal.SIGINT)
        _, errors = trainer.communicate(timeout=60)
    finally:
        trainer.kill()
    assert trainer.returncode == 130
    assert "Traceback" not in errors
    assert resume(tmp_path / "run", backend=Backend(workers=0)).iterations_done == 3


@contextmanager
def cluster(folder: Path, threads: int) -> Iterator[str]:
    """A scheduler and one worker as separate processes, started in a folder; yields the scheduler's address."""
    common = ["--no-dashboard", "--host", "127.0.0.1"]
    with ExitStack() as stack:
        scheduler = stack.enter_context(_running(folder, "scheduler", "--port", "0", *common))
        address = _wait_for(scheduler, r"Scheduler at:\s+(tcp://127\.0\.0\.1:\d+)")
        options = ["--nthreads", str(threads), "--no-nanny"]
        worker = stack.enter_context(_running(folder, "worker", address, *options, *common))
        _wait_for(worker, r"(Registered to)")
        yield address


@contextmanager
def _running(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-m", "dask", *arguments], cwd=folder, env=environment, text=True, stderr=subprocess.PIPE
    )
    with process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate()


def _wait_for(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.search(pattern, line):
            return match[1]
    raise AssertionError(f"the process ended before it said {pattern}")


def _deaf_to(pid: int) -> set[int]:
    """Signals that a process blocks or ignores."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [int(mask, 16) for mask in re.findall(r"Sig(?:Blk|Ign):\s+([0-9a-f]+)", status)]
    return {number for number in range(1, 32) if any(mask >> (number - 1) & 1 for mask in masks)}


def test_a_scheduler_that_asks_for_a_certificate_is_told_from_one_that_is_not_there(tiny_config):
    backend = Backend(scheduler="tls://127.0.0.1:1").for_tasks(2)
    with (
        pytest.raises(WorkersError, match=r"there is no certificate .*TLS__CA_FILE"),
        rollout_workers(tiny_config(), backend),
    ):
        pass
