"""Samples, adaptation and updates on workers: the bits of one process, whoever computes what and however often."""

import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from distributed import Client, LocalCluster
from hypothesis import given
from hypothesis import strategies as st

import metaloom.flows.rollouts.mathematics.slots
import metaloom.flows.rollouts.waiting
from metaloom import storage
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import resume, train
from metaloom.flows.errors import UsageError, WorkersError
from metaloom.flows.observer import Observer
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.backends import rollout_workers
from metaloom.flows.rollouts.connection import Connection
from metaloom.flows.rollouts.mathematics import orders
from metaloom.flows.rollouts.mathematics.orders import ChunkOrder, Cut, Maker, Order, compute
from metaloom.flows.rollouts.mathematics.places import Piece, Places
from metaloom.flows.rollouts.mathematics.sending import dumps, loads, packed
from metaloom.flows.rollouts.mathematics.slots import Slot, Slots, assign, most_slots
from metaloom.flows.rollouts.versions import computing_fingerprint, require_own_to_compute
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.algorithms.finite_checks import NumericalError
from metaloom.pipeline.building import build_learner
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.config.sources import plugin_paths
from metaloom.pipeline.parallel import join_tasks, keep, keep_tasks
from metaloom.pipeline.types import Samples

PEARL = ("iterations=2", "algorithm.num_updates=2", "algorithm.batch_size=16", "algorithm.embedding_batch_size=16")
SIZES = dict(num_tasks=9, iterations=2)
ALGORITHMS = {
    "promp": {"name": "promp", "num_epochs": 2},
    "maml-trpo": {"name": "maml-trpo"},
    "maml-trpo by differences": {"name": "maml-trpo", "hvp": "finite_difference"},
    "e-maml by torch": {"name": "e-maml", "hvp": "hessian", "kernel": "torch"},
    "vpg-dice": {"name": "vpg-dice"},
    "promp of minibatches": {"name": "promp", "num_minibatches": 2, "trainable_inner_lr": True},
    "maml-vpg of two steps": {"name": "maml-vpg", "inner_steps": 2, "gradient_noise": True},
    "promp normalized": {"name": "promp", "num_epochs": 2},
}


@pytest.fixture(scope="module")
def there() -> Iterator[LocalCluster]:
    """A scheduler with two worker processes."""
    quiet = {"dashboard_address": "127.0.0.1:0", "worker_dashboard_address": "127.0.0.1:0"}
    options = {"threads_per_worker": 1, "host": "127.0.0.1", "silence_logs": logging.CRITICAL}
    with LocalCluster(n_workers=2, **options, **quiet) as cluster:
        yield cluster


def on_workers(there: LocalCluster) -> Backend:
    return Backend(scheduler=there.scheduler_address, mathematics="workers")


@pytest.mark.dask
@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        name if name in ("promp", "maml-trpo", "promp normalized") else pytest.param(name, marks=pytest.mark.sweep)
        for name in ALGORITHMS
    ],
)
def test_workers_give_the_digests_of_one_process(tmp_path, tiny_config, digests, there, algorithm):
    settings = {**ALGORITHMS[algorithm], "tasks_per_chunk": 2}
    processing = {"return_baseline": {"name": "linear_time"}} if algorithm == "vpg-dice" else {}
    if algorithm == "promp normalized":
        processing = {"scale_rewards": True}
    normalizes = {"hidden_sizes": [8, 8], "normalize_observations": algorithm == "promp normalized"}
    config = tiny_config(algorithm=settings, policy=normalizes, processing=processing, **SIZES)
    train(config, tmp_path / "here", backend=Backend(workers=0))
    train(config, tmp_path / "there", backend=on_workers(there))
    assert digests(tmp_path / "there") == digests(tmp_path / "here")


@pytest.mark.dask
@pytest.mark.slow
def test_batches_stay_where_they_were_made_and_only_small_things_are_sent(tmp_path, tiny_config, there):
    config = tiny_config(num_tasks=8, episodes_per_task=40, max_episode_steps=50, iterations=2)
    totals = []

    def report(report):
        totals.append((report.traffic.sent_bytes, report.traffic.received_bytes))

    train(config, tmp_path / "run", backend=on_workers(there), observer=Observer(iteration_done=report))
    sent, received = np.subtract(totals[1], totals[0])
    run = storage.open_run(tmp_path / "run")
    batches = sum(
        array.nbytes
        for ref in run.refs()
        if ref.iteration == 1 and ref.stage in ("collect_rollouts", "process_samples", "adapt")
        for array in storage.format.codec.flatten(run.load(ref)).values()
    )
    assert sent < 0.1 * batches
    assert batches <= received < 1.1 * batches


@pytest.mark.dask
@pytest.mark.slow
def test_what_a_lost_worker_held_is_computed_again(tmp_path, tiny_config, digests, there, monkeypatch, caplog):
    monkeypatch.setattr(metaloom.flows.rollouts.waiting, "_LOOK_EVERY_SECONDS", 0.2)
    config = tiny_config(num_tasks=9, iterations=3)
    train(config, tmp_path / "here", backend=Backend(workers=0))
    killed = []

    def kill(ref):
        if (ref.iteration, ref.stage, ref.step) in ((1, "adapt", 0), (2, "meta_optimize", 0)):
            killed.append(ref)
            with Client(there) as client:
                pid = client.run(os.getpid, workers=[next(iter(client.nthreads()))])
            os.kill(*pid.values(), signal.SIGKILL)

    train(config, tmp_path / "there", backend=on_workers(there), observer=Observer(stage_started=kill))
    assert len(killed) == 2
    assert digests(tmp_path / "there") == digests(tmp_path / "here")


@pytest.mark.dask
@pytest.mark.slow
def test_what_no_worker_has_is_sent_there(tmp_path, tiny_config, digests, there):
    config = tiny_config(**SIZES)
    train(config, tmp_path / "here", backend=Backend(workers=0))
    stop = iter([False] * 5 + [True])  # before process_samples of the second inner step
    half = train(
        config, tmp_path / "there", observer=Observer(should_stop=lambda: next(stop)), backend=Backend(workers=0)
    )
    assert half.stopped
    resume(tmp_path / "there", backend=on_workers(there))
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
    outcomes = [*replay(tmp_path / "here", 1, backend=on_workers(there))]
    assert len(outcomes) >= 6
    assert all(outcome.identical for outcome in outcomes)


@pytest.mark.dask
@pytest.mark.slow
def test_a_fault_is_told_as_by_one_process(tiny_config, there):
    config, numbers = tiny_config(num_tasks=9), np.arange(9.0)
    bounds = [slice(start, start + 2) for start in range(0, 8, 2)]

    def chunk(tasks, first_task, *, numbers):
        return first_task + tasks.start, numbers[0][tasks]

    def value_of(item):
        first, values = item
        if first >= 4:
            raise NumericalError(f"task {first}")
        return float(values.sum())

    def all_tasks(parallel, numbers):
        if numbers[0].max() > 5:
            raise NumericalError(f"task {numbers[0].argmax()}")
        return numbers[0]

    with rollout_workers(config, on_workers(there)) as workers:
        parallel = workers.mathematics(config, build_learner(config)[1], map)
        for each in (map, parallel):
            items = keep_tasks(each, chunk, bounds, numbers=[numbers])
            assert [*each(value_of, items[:2])] == [1.0, 5.0]
            with pytest.raises(NumericalError, match="task 4"):
                list(each(value_of, items))
            assert np.array_equal(join_tasks(each, all_tasks, 1, numbers=[numbers[:6]]), numbers[:6])
            with pytest.raises(NumericalError, match="task 8"):
                join_tasks(each, all_tasks, 1, numbers=[numbers])


@pytest.mark.sweep
@pytest.mark.dask
@pytest.mark.parametrize("name", ["promp", "maml-trpo", "pearl"])
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_any_number_of_worker_processes_gives_the_digests_of_one(tmp_path, tiny_config, digests, name, workers):
    pearl = build_config(override(load_settings("pearl-sparse-point-robot"), PEARL))
    config = pearl if name == "pearl" else tiny_config(algorithm={"name": name}, num_tasks=17, iterations=2)
    mathematics = "auto" if name == "pearl" else "workers"
    train(config, tmp_path / "here", backend=Backend(workers=0))
    train(config, tmp_path / "there", backend=Backend(workers=workers, mathematics=mathematics))
    assert digests(tmp_path / "there") == digests(tmp_path / "here")


def test_mathematics_on_workers_is_refused_where_there_are_none():
    with pytest.raises(UsageError, match="mathematics=workers without worker processes"):
        Backend(workers=0, mathematics="workers")


@pytest.mark.dask
@pytest.mark.slow
def test_mathematics_on_workers_is_refused_for_an_algorithm_that_looks_at_all_tasks(tmp_path, tiny_config, there):
    config = tiny_config(algorithm={"name": "ppo"}, num_tasks=4)
    with pytest.raises(UsageError, match="ppo looks at all tasks"):
        train(config, tmp_path / "run", backend=on_workers(there))
    assert not (tmp_path / "run").exists()


class Threads:
    """A client of workers with so many threads, that tell this of their arithmetic."""

    def __init__(self, threads: dict[str, int], told: dict[str, object]) -> None:
        self._threads, self._told = threads, told

    def nthreads(self):
        return self._threads

    def run(self, function, *, workers: Sequence[str], on_error: str):
        del function, on_error
        return {worker: self._told[worker] for worker in workers}


WORKERS = st.sampled_from("abc")


def connection(client):
    return Connection(lambda: nullcontext(client), ExitStack())


@pytest.mark.parametrize(
    ("threads", "elsewhere", "cores", "chosen"),
    [
        ({"a": 2, "b": 1}, True, 2, 3),
        ({"a": 2, "b": 1}, True, 3, 0),
        ({"a": 2, "b": 1}, False, 1, 0),
        ({"a": 2, "other": 2}, True, 1, 0),
        ({"a": 2, "without": 2}, True, 1, 0),
        ({"a": 2, "gone": 2}, True, 1, 0),
        ({}, True, 1, 0),
    ],
)
def test_workers_compute_where_all_compute_alike_and_have_more_threads_than_there_are_cores_here(
    threads, elsewhere, cores, chosen, monkeypatch
):
    monkeypatch.setattr(metaloom.flows.rollouts.mathematics.slots, "usable_cores", lambda: cores)
    monkeypatch.setattr(metaloom.flows.rollouts.mathematics.slots, "arithmetic", lambda: "Haswell")
    without, gone = ImportError("no torch", name="torch"), OSError("no answer")
    told = {"a": "Haswell", "b": "Haswell", "other": "Zen", "without": without, "gone": gone}
    slots = Slots(connection(Threads(threads, told)), required=False, elsewhere=elsewhere, num_chunks=20)
    assert len(slots.chosen()) == len(slots.chosen()) == chosen


def test_the_trainer_computes_what_would_keep_fewer_workers_busy_than_it_has_cores(monkeypatch):
    monkeypatch.setattr(metaloom.flows.rollouts.mathematics.slots, "usable_cores", lambda: 8)
    monkeypatch.setattr(metaloom.flows.rollouts.mathematics.slots, "arithmetic", lambda: "Haswell")
    there = connection(Threads({"a": 40}, {"a": "Haswell"}))
    chosen = [Slots(there, required=False, elsewhere=True, num_chunks=n).chosen() for n in (20, 40)]
    assert [len(slots) for slots in chosen] == [0, 40]


def test_workers_of_another_kind_that_have_to_compute_are_refused(monkeypatch):
    monkeypatch.setattr(metaloom.flows.rollouts.mathematics.slots, "arithmetic", lambda: "Haswell")
    with pytest.raises(WorkersError, match="worker a computes by Zen, this process by Haswell"):
        Slots(connection(Threads({"a": 1}, {"a": "Zen"})), required=True, elsewhere=True, num_chunks=20).chosen()
    order = Order("s", frozenset(), 0, 0, (), stays=False, versions={}, arithmetic="Zen")
    with pytest.raises(WorkersError, match="the trainer by Zen; required the same"):
        compute(order, ["{}"])


def test_a_worker_with_another_torch_or_python_refuses_to_compute(tiny_config):
    paths = plugin_paths(tiny_config())
    here = computing_fingerprint(paths)
    require_own_to_compute(here, paths)
    for other in ({"torch": "1.0"}, {"Python": "2.7"}):
        order = Order("s", frozenset(), 0, 0, (), stays=False, versions=here | other, arithmetic="")
        with pytest.raises(WorkersError, match=f"{next(iter(other))} .* there, {next(iter(other.values()))} here"):
            compute(order, [tiny_config().model_dump_json()])


@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(1, 9))),
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), min_size=1),
)
def test_chunks_are_divided_evenly(held, threads):
    slots = [Slot(worker, thread) for worker, number in threads.items() for thread in range(number)]
    chosen = assign(held, slots)
    assert len(chosen) == len(held)
    most = -(-len(held) // min(len(slots), most_slots(len(held))))
    assert all(number <= most for number in Counter(chosen).values())
    assert len({*chosen}) <= most_slots(len(held))
    assert {*chosen} <= {*slots}


@pytest.mark.parametrize(("num_chunks", "slots"), [(0, 1), (1, 1), (4, 3), (20, 8), (500, 41)])
def test_no_more_threads_compute_than_their_orders_are_worth(num_chunks, slots):
    assert most_slots(num_chunks) == slots
    if num_chunks > 1:
        best = min(range(1, num_chunks + 1), key=lambda n: 4 * n + 14 * num_chunks / n)
        assert abs(best - slots) <= 1


def test_a_chunk_goes_to_the_worker_that_holds_most_of_it_while_there_is_room():
    slots = [Slot("a", 0), Slot("b", 0)]
    held = [{"b": 1, "a": 2}, {"a": 2}, {"a": 1}, {}]
    assert [slot.worker for slot in assign(held, slots)] == ["a", "a", "b", "b"]


def test_without_workers_keeping_is_mapping():
    batch = np.arange(10)

    def work(tasks, first_task, *, numbers):
        return int(numbers[0][tasks].sum()) + first_task

    sums = keep_tasks(map, work, [slice(0, 4), slice(4, 10)], numbers=[batch])
    assert sums == [6, 39]
    assert keep(map, lambda number: number + 1, sums) == [7, 40]
    assert join_tasks(map, lambda parallel, numbers: [*parallel(abs, -numbers[0])], 2, numbers=[batch]) == [*batch]


def test_work_is_sent_without_the_learner(tiny_config):
    for normalizes in (False, True):
        _sends_work_without_the_learner(tiny_config(processing={"scale_rewards": normalizes}))


def _sends_work_without_the_learner(config):
    _, learner, _ = build_learner(config)
    inner, state = learner.unwrapped, learner.initialize(run_seed=7)
    assert (inner is learner) is not config.processing.scale_rewards

    def work(parallel):
        return learner, inner, inner.policy, state.params, parallel

    raw = dumps(work, learner)
    names = (b"ProMPLearner", b"NormalizingLearner", b"GaussianPolicy", b"Setup")
    assert not {name for name in names if name in raw}
    built, own, policy, params, parallel = loads(raw, config.model_dump_json())(map)
    assert (type(built), own.settings, parallel) == (type(learner), inner.settings, map)
    assert built is not learner
    assert own is built.unwrapped
    assert policy is own.policy
    assert all(np.array_equal(params[name], value) for name, value in state.params.items())


def test_results_are_sent_without_what_torch_adds():
    results = [{"gradient": torch.arange(3.0)}] * 4
    raw = packed(results)
    assert len(raw) < 400
    assert torch.equal(orders.Answer(raw, None).unpacked()[3]["gradient"], torch.arange(3.0))


def test_a_worker_keeps_what_it_made_while_it_may_be_asked_again(tiny_config):
    settings = tiny_config().model_dump_json()
    _, learner, _ = build_learner(tiny_config())
    CALLS.clear()
    values = [settings, np.arange(10), dumps(_made, learner), dumps(_doubled, learner), dumps(_identity, learner)]
    cuts = {"numbers": [(Cut(1, (), 2, 4), Cut(1, (), 4, 7))]}
    chunk = ChunkOrder(2, 5, cuts, (Maker(11, 2), Maker(12, 3)))

    def ask(*live):
        return compute(
            Order("a session", frozenset(live), 0, 4, (chunk,), stays=True, versions={}, arithmetic=""), values
        ).results

    assert ask(11, 12) == ask(11, 12) == (2 * (2 + 3 + 4 + 5 + 6),)
    assert CALLS == {2: 1}
    ask(11)  # what was made of it is computed again, of the same
    assert CALLS == {2: 1}
    ask()
    assert CALLS == {2: 2}


CALLS = Counter[int]()


def _made(item):
    tasks, first_task, batches = item
    CALLS[first_task] += 1
    return batches["numbers"][0][tasks]


def _doubled(numbers):
    return 2 * int(numbers.sum())


def _identity(item):
    return item


def test_a_fault_ends_an_order_and_is_told_with_what_came_before(tiny_config):
    settings = tiny_config().model_dump_json()
    _, learner, _ = build_learner(tiny_config())
    values = [settings, np.arange(10), dumps(_refusing, learner)]
    chunks = tuple(ChunkOrder(n, 1, {"numbers": [(Cut(1, (), n, n + 1),)]}, ()) for n in (1, 2, 3))
    answer = compute(
        Order("another session", frozenset(), 0, 2, chunks, stays=False, versions={}, arithmetic=""), values
    )
    assert answer.unpacked() == [1]
    assert isinstance(answer.fault, NumericalError)
    assert str(answer.fault) == "task 2"


def _refusing(item):
    _, first_task, batches = item
    if first_task > 1:
        raise NumericalError(f"task {first_task}")
    return int(batches["numbers"][0][0])


def test_a_batch_that_is_gone_is_nowhere():
    places, zeros = Places(), np.zeros((2, 1, 1), np.float32)
    samples, client = Samples(zeros, zeros, zeros, zeros), SimpleNamespace(status="running")
    piece = Piece(SimpleNamespace(client=client), (), 0, 2)
    places.remember(samples, [piece])
    assert places.of(samples) == (piece,)
    client.status = "closed"
    assert not places.of(samples)
    client.status = "running"
    assert not places.of(Samples(zeros, zeros, zeros, zeros))
    del samples
    assert not places._pieces
