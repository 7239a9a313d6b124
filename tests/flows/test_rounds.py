"""Rounds of rollouts on workers that come, go, die and take too long: the shards and the bits stay the same."""

import contextlib
import logging
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from dask.sizeof import sizeof
from distributed import KilledWorker, LocalCluster
from hypothesis import given
from hypothesis import strategies as st
from prefect_server import wait_for

import metaloom.flows.rollouts.connection
import metaloom.flows.rollouts.dask
from metaloom import storage
from metaloom.flows.commands.train import Observer, train
from metaloom.flows.errors import WorkersError
from metaloom.flows.graph.run_stages import rollout_workers
from metaloom.flows.rollouts.backend import Traffic
from metaloom.flows.rollouts.dask import (
    FEWEST_SHARDS,
    SECONDS_PER_SHARD,
    DaskWorkers,
    ShardAttempt,
    tasks_per_shard,
)
from metaloom.flows.rollouts.flight_recorder import NOT_YET, RESET, Recording
from metaloom.flows.rollouts.guard import Header
from metaloom.flows.rollouts.supervised import (
    CollectedShard,
    Shard,
    Supervision,
    collect_watched,
    fingerprint,
    require_own_versions,
    require_versions,
    try_environment,
)
from metaloom.flows.rollouts.workers import Backend, LocalWorkers, SamplerSpec
from metaloom.pipeline.building import build_learner
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.tasks.samplers import draw_tasks
from metaloom.stages.collect_rollouts import RolloutPosition
from metaloom.stages.rollouts.faults import RolloutError
from metaloom.storage.format.codec import flatten

pytestmark = pytest.mark.usefixtures("warm")

AT = RolloutPosition(1, 12, 1)


@pytest.fixture
def round_of():
    """What a round is collected from: the sampler's settings, parameters and tasks of a run."""

    def build(config):
        _, learner, _ = build_learner(config)
        params = learner.acting_params(learner.initialize(run_seed=1), config.num_tasks)
        tasks = draw_tasks(make_env(config.env), num_tasks=config.num_tasks, run_seed=1, iteration=0)
        return SamplerSpec.of(config, 1), params, tasks

    return build


@given(st.integers(1, 2000), st.floats(1e-6, 1e4))
def test_shards_are_many_and_of_a_power_of_two_and_short_unless_a_task_is_long(num_tasks, seconds_per_task):
    size = tasks_per_shard(num_tasks, seconds_per_task)
    assert size & (size - 1) == 0
    assert size == 1 or size * seconds_per_task <= SECONDS_PER_SHARD
    assert -(-num_tasks // size) >= min(num_tasks, FEWEST_SHARDS)


@pytest.mark.parametrize(
    ("num_tasks", "seconds_per_task", "size"),
    [
        *((40, 0.067, 4), (40, 0.01, 8), (40, 0.015, 4), (40, 0.3, 2), (40, 0.9, 1), (32, 0.001, 8), (33, 0.1, 4)),
        *((1000, 0.002, 64), (3, 9, 1)),
    ],
)
def test_tasks_per_shard(num_tasks, seconds_per_task, size):
    assert tasks_per_shard(num_tasks, seconds_per_task) == size


@pytest.mark.parametrize(("threads", "size"), [(0, 8), (2, 8), (4, 4), (16, 1), (1000, 1)])
def test_every_thread_has_two_shards_where_there_are_the_tasks(threads, size):
    assert tasks_per_shard(40, 0.01, threads) == size


def test_the_first_round_is_cut_by_its_steps_and_the_next_by_what_it_took(tiny_config):
    spec = SamplerSpec.of(tiny_config(episodes_per_task=20, max_episode_steps=100), 1)
    workers = DaskWorkers(spec, SimpleNamespace(num_threads=0), None, False)
    assert workers.bounds(40) == [(n, n + 4) for n in range(0, 40, 4)]
    workers.costs[spec.model_dump_json()] = 0.4
    assert workers.bounds(41) == [*((n, n + 2) for n in range(0, 40, 2)), (40, 41)]
    of_evaluation = workers.sampling(20, deterministic=True)
    of_trial = workers.sampling(20, deterministic=True, one_trial=True)
    for others in (of_evaluation, of_trial):
        assert others.bounds(40) == [(n, n + 4) for n in range(0, 40, 4)]


def test_a_shard_costs_what_a_processor_worked_for_it_unless_it_mostly_waited_for_something_else():
    assert CollectedShard(None, seconds=4.0, processor_seconds=1.0).cost == 1.0
    for little in (0.1, 0.4):
        assert CollectedShard(None, seconds=4.0, processor_seconds=little).cost == 4.0


def test_dask_knows_the_sizes_of_batches(tiny_config, round_of):
    config = tiny_config()
    spec, params, tasks = round_of(config)
    episodes = LocalWorkers(spec).collect(params, tasks, AT)
    expected = sum(array.nbytes for array in flatten(episodes).values())
    assert sizeof(episodes) == sizeof(CollectedShard(episodes, 1.0, 1.0)) == expected > 1000


@pytest.mark.dask
@pytest.mark.slow
def test_workers_know_the_sizes_of_what_they_hold_and_give_it_to_the_trainer_themselves(tiny_config, round_of):
    config = tiny_config(num_tasks=8)
    spec, params, tasks = round_of(config)
    with cluster(1) as there, _workers(config, there) as workers, pytest.MonkeyPatch.context() as patch:
        patch.setitem(there.scheduler.handlers, "gather", None)
        held = list[int]()
        patch.setattr(
            CollectedShard, "cost", property(lambda answer: held.extend(_sizes_at(there) if not held else []) or 1.0)
        )
        found = workers.collect(params, tasks, AT)
        assert sum(held) == sum(array.nbytes for array in flatten(found).values())
        sent = sum(array.nbytes for array in (*params.params.values(), tasks.params, tasks.ids))
        sent += len(held) * len("".join((*tasks.names, *tasks.units)))  # every shard has the names
        assert workers.traffic() == Traffic(len(held), 0, sent, sum(held), threads=1)
        assert workers.costs == {spec.model_dump_json(): len(held) / 8}


def _sizes_at(there: LocalCluster) -> list[int]:
    return [task.nbytes for key, task in there.scheduler.tasks.items() if key.startswith("collect_rollouts")]


def test_a_worker_with_other_versions_refuses_its_first_shard(tiny_config, round_of):
    spec, params, tasks = round_of(tiny_config())
    other = Supervision("0", "0", 60.0, {"numpy": "0.1"})
    with pytest.raises(WorkersError, match=r"has different versions: numpy .* there, 0\.1 here"):
        collect_watched(Shard(spec, tasks, AT), params, other)
    require_own_versions({}, spec)


def test_a_worker_needs_no_torch_but_that_of_the_trainer_where_it_has_one(tiny_config):
    spec = SamplerSpec.of(tiny_config(), 1)
    here = fingerprint(spec)
    assert torch.__version__.startswith(here["torch"].partition("+")[0])
    there = {name: value for name, value in here.items() if name != "torch"}
    require_versions(here, there, "at w")
    with pytest.raises(WorkersError, match=r"the Dask worker at w has different versions: torch 1\.0 there"):
        require_versions(here, there | {"torch": "1.0"}, "at w")
    with pytest.raises(WorkersError, match="numpy None there"):
        require_versions(here, {name: value for name, value in here.items() if name != "numpy"}, "at w")


def test_an_answer_that_goes_with_its_worker_is_computed_again():
    class Attempt:
        def __init__(self, *states):
            self.states = iter(states)

        @property
        def status(self):
            return next(self.states)

        def result(self):
            raise KilledWorker("shard", None, 3)

    class Client:
        def __init__(self):
            self.gone = True

        def submit(self, *args, **options):
            return Attempt("finished")

        def gather(self, futures):
            if futures and self.gone:
                self.gone = False
                futures[0].result()
            return [CollectedShard(None, 1.0, 1.0) for _ in futures]

    connection = metaloom.flows.rollouts.connection.Connection(
        lambda: contextlib.nullcontext(Client()), contextlib.ExitStack()
    )
    workers = DaskWorkers(None, connection, Supervision("s", "", 1.0), False)
    shard = SimpleNamespace(name="it", tasks=None)
    piece = ShardAttempt(shard, None, workers.supervise(), Attempt("finished", "error"))
    answers = []
    for _ in range(3):
        workers._gather_done([piece])
        answers.append(piece.answer)
    assert answers == [None, None, CollectedShard(None, 1.0, 1.0)]
    assert (workers.totals.submitted, workers.totals.repeated, piece.pardons) == (1, 1, 1)


def _recording(at=(), **changes) -> Recording:
    header = Header(8, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0.0, 0.0)._replace(**dict(at))
    nothing = np.zeros((0, 0, 0), np.float32)
    return Recording(**{"at": header, "actions": nothing, **dict.fromkeys(ENDS, False), "traceback": "", **changes})


ENDS = ("timed_out", "stopped", "closed")


@pytest.mark.parametrize(("begun", "pardons", "again"), [(3, 0, True), (4, 0, False), (0, 9, True), (0, 10, False)])
def test_a_shard_is_tried_as_often_as_its_workers_may_die_and_ten_times_where_it_is_not_to_blame(begun, pardons, again):
    submitted = list[str]()
    connection = SimpleNamespace(client=SimpleNamespace(submit=lambda *_, key, **__: submitted.append(key)))
    workers = DaskWorkers(None, connection, Supervision("s", "", 1.0), False)
    watch = SimpleNamespace(recordings=lambda: [_recording({"env_step": n}) for n in range(begun)])
    at = RolloutPosition(1, 12, 1, first_task=5)
    shard = SimpleNamespace(name="it", tasks=(1, 2, 3), position=at)
    killed = SimpleNamespace(result=Mock(side_effect=KilledWorker("shard", None, 3)))
    piece = ShardAttempt(shard, (), watch, pardons=pardons)
    if again:
        workers._after_failure(piece, killed)
        assert (submitted, piece.pardons) == (["it-s-1"], pardons + 1)
    else:
        places = re.escape(str([(0, 0, n, 0) for n in range(begun)]))
        message = rf"^iteration 12, inner step 1: several .* shard, tasks 5 to 7, but at different points .*{places}\)"
        with pytest.raises(WorkersError, match=message):
            workers._after_failure(piece, killed)
        assert not submitted


@pytest.mark.parametrize(("elsewhere", "ending"), [(False, "by SIGTERM"), (True, None)])
def test_who_died_at_one_point_alone_is_to_blame_and_is_told_how_the_last_one_ended(elsewhere, ending, monkeypatch):
    monkeypatch.setattr(metaloom.flows.rollouts.dask, "ending_of", {7: "by SIGABRT", 8: "by SIGTERM"}.get)
    workers = DaskWorkers(None, None, Supervision("s", "", 1.0), elsewhere)
    left = [_recording({"pid": 7, "env_step": NOT_YET}), _recording({"pid": 6}), _recording()]
    watch, death = SimpleNamespace(recordings=lambda: left), Mock(return_value=RolloutError("died"))
    assert workers._death(SimpleNamespace(position=AT, tasks=(1,), death=death), watch, left) is death.return_value
    death.assert_called_once_with(left[1:], watch, ending)


@pytest.mark.parametrize(
    ("at", "about"),
    [
        ({"env_step": NOT_YET, "row": -1}, {"call": "make", "env_step": None, "task": None, "tasks": [4, 8]}),
        ({"env_step": RESET, "row": -1}, {"call": "reset", "env_step": None, "task": None, "seeds": 12}),
        ({"env_step": 0, "row": -1}, {"call": "step", "env_step": 0, "task": None, "episodes_per_task": 3}),
        ({"env_step": 0, "row": 0}, {"call": "step", "env_step": 0, "task": 4, "episode": 0}),
        ({"env_step": 2, "row": 7, "first_episode": 6}, {"call": "step", "env_step": 2, "task": 6, "episode": 7}),
    ],
)
def test_a_death_is_told_with_what_was_called_and_for_which_episode(at, about, tiny_config, round_of):
    spec, _, tasks = round_of(tiny_config())
    shard = Shard(spec, tasks, RolloutPosition(1, 12, 1, first_task=4))
    found = shard.death([_recording(at)], Supervision("s", "", 1.0)).about
    assert {name: len(found[name]) if name == "seeds" else found[name] for name in about} == about
    # Without actions there are none of the episode, or of all 12.
    rows = () if about["task"] is not None else (12,)
    assert shard.death([_recording(at)], Supervision("s", "", 1.0)).arrays["actions"].shape == (0, *rows, 0)


def test_a_death_among_blocks_of_episodes_is_one_of_its_task_alone(tiny_config, round_of):
    spec, _, tasks = round_of(tiny_config())
    shard = Shard(spec.model_copy(update={"min_steps": 20}), tasks, RolloutPosition(1, 12, 1, first_task=4))
    found = shard.death([_recording({"first_task": 6, "row": -1})], Supervision("s", "", 1.0))
    assert found.about["tasks"] == [6, 7]
    assert (found.arrays["tasks"] == tasks.params[2]).all()


@pytest.mark.parametrize(
    ("recordings", "ending", "words"),
    [
        ([{}], "by SIGTERM", "its process died without a message, by SIGTERM; an environment must"),
        ([{}, {}], None, "its process died 2 times at the same point without a message, as by os._exit, or by kill -9"),
        ([{"traceback": "Fatal: it broke\n  line 1"}], None, "its process died: Fatal: it broke\n"),
        ([{"timed_out": True}], None, "did not return within 2.5 s, so its process was ended."),
        ([{"timed_out": True, "stopped": True}], None, "its process was stopped (SIGSTOP, by itself"),
    ],
)
def test_how_a_process_ended_is_told(recordings, ending, words, tiny_config, round_of):
    spec, _, tasks = round_of(tiny_config())
    died = [_recording(**changes) for changes in recordings]
    assert f"step 2: {words}" in str(Shard(spec, tasks, AT).death(died, Supervision("s", "", 2.5), ending))


@pytest.mark.parametrize("final", ["timed_out", "closed"])
def test_what_hung_or_closed_what_it_had_not_opened_is_not_tried_again(final, tiny_config, round_of):
    spec, params, tasks = round_of(tiny_config())
    left = [_recording(**{final: True, "traceback": "line 7"}), _recording()]
    watch = SimpleNamespace(versions={}, step_timeout_seconds=1.0, recordings=lambda: left)
    with pytest.raises(RolloutError, match="line 7"):
        collect_watched(Shard(spec, tasks, AT), params, watch)
    watch.recordings = lambda: [_recording(timed_out=True), _recording(traceback="line 8")]
    with pytest.raises(TimeoutError, match="line 8"):
        try_environment(spec, watch)


def test_workers_with_other_machine_code_are_told_once_with_the_remedy(caplog, monkeypatch):
    monkeypatch.setattr(
        metaloom.flows.rollouts.connection, "acting_facts", lambda: ("mkl 2", "numpy V3", "openblas Haswell")
    )
    tell = metaloom.flows.rollouts.connection._warn_other_arithmetic
    tell({"a": ("numpy V3", "openblas Haswell"), "b": ("mkl 2", "numpy V3", "openblas Haswell")})
    assert not caplog.records
    tell({"a": ("numpy V3", "openblas SkylakeX"), "b": ("openblas Haswell",), "c": ("numpy V4", "openblas Haswell")})
    (record,) = caplog.records
    told = record.getMessage()
    assert told.startswith("2 of 3 Dask workers use different CPU code paths from this process")
    assert "numpy V3, openblas SkylakeX at a" in told
    assert 'OPENBLAS_CORETYPE=Haswell, ATEN_CPU_CAPABILITY=avx2 and NPY_DISABLE_CPU_FEATURES="X86_V4' in told


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the remedy is for x86-64")
def test_the_remedy_chooses_the_machine_code_that_it_names():
    code = "from metaloom.pipeline.nn.device import arithmetic_facts as facts; print(*facts().values(), sep='; ')"
    remedy = {
        "OPENBLAS_CORETYPE": "Haswell",
        "ATEN_CPU_CAPABILITY": "avx2",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    }
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, env={**os.environ, **remedy}, check=True, capture_output=True, text=True).stdout
    assert told.split("; ") == ["openblas Haswell", "X86_V3", "AVX2\n"]


@pytest.mark.dask
@pytest.mark.slow
def test_shards_do_not_depend_on_the_workers_that_are_there_and_two_runs_do_not_meet(tiny_config, round_of):
    config = tiny_config(num_tasks=6)
    spec, params, tasks = round_of(config)
    here = _digest(LocalWorkers(spec).collect(params, tasks, AT))
    keys: list[list[str]] = []
    with cluster(1) as there, _workers(config, there) as one, _workers(config, there) as other:
        for workers in (one, other):
            with _keys(workers) as submitted:
                # The same place twice, as when a run is resumed or replayed.
                assert _digest(workers.collect(params, tasks, AT)) == here
                assert _digest(workers.collect(params, tasks, AT)) == here
            keys.append(submitted)
        there.scale(2)
        one.connection.client.wait_for_workers(2)
        with _keys(one) as submitted:
            assert _digest(one.collect(params, tasks, AT)) == here
        keys.append(submitted)
        with pytest.MonkeyPatch.context() as patch:
            for threads in (2, 8, 16):
                patch.setattr(metaloom.flows.rollouts.connection.Connection, "num_threads", threads)
                assert _digest(one.collect(params, tasks, AT)) == here
    names = [[re.match(r"(.*)-[0-9a-f]{16}-\d+$", key)[1] for key in each] for each in keys]
    expected = [f"collect_rollouts-i12-k1-tasks{n}:{n + 1}" for n in range(6)]
    assert names == [expected * 2, expected * 2, expected]
    assert len({key for each in keys for key in each}) == 30


@pytest.mark.dask
@pytest.mark.slow
def test_a_worker_that_leaves_while_all_are_asked_for_their_versions_is_no_lost_scheduler(
    tiny_config, round_of, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "hostile"))
    options = {"fault": "die_once_in_constructor", "mark": str(tmp_path / "died")}
    config = tiny_config(env={"name": "hostile_envs:Hostile", "options": options}, num_tasks=2)
    with cluster(2) as there, _workers(config, there) as workers:
        assert (tmp_path / "died").exists()
        spec, params, tasks = round_of(config)
        assert _digest(workers.collect(params, tasks, AT)) == _digest(LocalWorkers(spec).collect(params, tasks, AT))


@pytest.mark.dask
@pytest.mark.sweep
def test_a_scheduler_of_our_own_that_ends_is_followed_by_another_with_its_workers(tiny_config, round_of, caplog):
    config = tiny_config()
    spec, params, tasks = round_of(config)
    with rollout_workers(config, Backend(workers=1).for_tasks(4)) as workers:
        workers.connection.client.sync(workers.connection.client.cluster.scheduler.close)
        assert _digest(workers.collect(params, tasks, AT)) == _digest(LocalWorkers(spec).collect(params, tasks, AT))
    assert "iteration 12, inner step 1: the Dask scheduler is back" in caplog.text


@pytest.mark.dask
@pytest.mark.slow
def test_a_cluster_without_workers_grows_for_a_run_and_shrinks_with_equal_digests(tmp_path, tiny_config, digests):
    sizes = dict(num_tasks=12, episodes_per_task=20, max_episode_steps=300, iterations=2)
    config = tiny_config(**sizes)
    train(config, tmp_path / "here", backend=Backend(workers=0))
    with cluster(0) as there:
        adaptive = there.adapt(minimum=0, maximum=3, interval="100ms", target_duration="20ms", wait_count=3)
        assert not there.scheduler.workers
        train(config, tmp_path / "there", backend=Backend(scheduler=there.scheduler_address))
        deadline = time.monotonic() + 60
        while there.scheduler.workers and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not there.scheduler.workers
    # How many are worth starting depends on how fast they are; more than the one that a round of one task asks for.
    assert max(entry["n"] for _, entry in adaptive.log if entry["status"] == "up") >= 2
    assert digests(tmp_path / "there") == digests(tmp_path / "here")


@pytest.mark.dask
@pytest.mark.sweep
def test_a_cluster_grows_from_none_to_six_shrinks_to_one_and_grows_again_in_one_run(tmp_path, tiny_config, digests):
    config = tiny_config(num_tasks=48, episodes_per_task=20, max_episode_steps=300, iterations=2)
    train(config, tmp_path / "here", backend=Backend(workers=0))
    with cluster(0) as there:
        adaptive = there.adapt(minimum=0, maximum=6, interval="100ms", target_duration="20ms", wait_count=10)
        with _sizes(there) as sizes:

            def shrink(ref):
                if ref == storage.StageRef(0, "meta_optimize"):
                    # As long as the trainer's own stages may be.
                    adaptive.minimum = 1
                    wait_for(lambda: len(there.scheduler.workers) == 1, "one is left")

            backend = Backend(scheduler=there.scheduler_address)
            train(config, tmp_path / "there", backend=backend, observer=Observer(stage_started=shrink))
    assert sizes[0] == 0
    assert max(sizes) == 6
    one_is_left = sizes.index(1, sizes.index(6))
    assert max(sizes[one_is_left:]) > 1
    assert digests(tmp_path / "there") == digests(tmp_path / "here")


@contextlib.contextmanager
def _sizes(there: LocalCluster) -> Iterator[list[int]]:
    """Numbers of workers while the context lasts, each time that they change."""
    sizes, done = [len(there.scheduler.workers)], threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            if (now := len(there.scheduler.workers)) != sizes[-1]:
                sizes.append(now)

    watching = threading.Thread(target=look)
    watching.start()
    try:
        yield sizes
    finally:
        done.set()
        watching.join()


@contextlib.contextmanager
def cluster(workers: int) -> Iterator[LocalCluster]:
    """A scheduler whose worker processes come and go as a test likes."""
    quiet = {"dashboard_address": "127.0.0.1:0", "worker_dashboard_address": "127.0.0.1:0"}
    with LocalCluster(
        n_workers=workers, threads_per_worker=1, host="127.0.0.1", silence_logs=logging.CRITICAL, **quiet
    ) as there:
        yield there


@contextlib.contextmanager
def _workers(config, there: LocalCluster) -> Iterator[DaskWorkers]:
    backend = Backend(scheduler=there.scheduler_address).for_tasks(config.num_tasks)
    with rollout_workers(config, backend) as workers:
        assert isinstance(workers, DaskWorkers)
        yield workers


@contextlib.contextmanager
def _keys(workers: DaskWorkers) -> Iterator[list[str]]:
    """Keys of what is submitted in the block."""
    keys, submit = list[str](), workers.connection.client.submit

    def noted(*args, key, **options):
        keys.append(key)
        return submit(*args, key=key, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers.connection.client, "submit", noted)
        yield keys


def _digest(episodes) -> str:
    return storage.output_digest(storage.digest(episodes))
