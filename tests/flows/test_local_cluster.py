"""Workers of this machine end without a message."""

import os

import dask.config
import pytest

from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts import local_cluster
from metaloom.flows.rollouts.local_cluster import local_client


@pytest.mark.dask
@pytest.mark.slow
def test_a_worker_says_nothing_of_a_heartbeat_that_finds_its_scheduler_closed_and_all_else():
    async def heartbeats(dask_worker):
        import logging

        from distributed.comm.core import CommClosedError

        said, keep = [], logging.Handler()
        keep.emit = lambda record: said.append(f"{record.getMessage()} {record.exc_info[1]}")
        logger, measure = logging.getLogger("distributed.worker"), dask_worker.get_metrics
        logger.addHandler(keep)
        for error in (CommClosedError("Stream is closed"), OSError("no route to host")):

            async def fail(error=error):
                raise error

            dask_worker.get_metrics = fail
            await dask_worker.heartbeat()
        dask_worker.get_metrics = measure
        logger.removeHandler(keep)
        return said

    with local_client(1, 0, "heartbeats") as client:
        (said,) = client.run(heartbeats).values()
    assert said == ["Failed to communicate with scheduler during heartbeat. no route to host"]


@pytest.mark.dask
@pytest.mark.slow
def test_settings_of_other_clusters_do_not_reach_our_own_which_leaves_neither_settings_nor_variables(monkeypatch):
    for name in ("PYTHONHASHSEED", "MALLOC_TRIM_THRESHOLD_", "MKL_NUM_THREADS"):  # which Dask sets for workers
        monkeypatch.delenv(name, raising=False)
    before = {"__DASK_PARENT_PID": str(os.getpid()), **os.environ}
    others = {"distributed.scheduler.idle-timeout": "1s", "distributed.worker.memory.pause": 1e-6}

    def read():
        return [dask.config.get(name) for name in others]

    with dask.config.set(others):
        with local_client(1, 0, "own settings") as client:
            assert (client.direct_to_workers, [*client.nthreads().values()]) == (True, [1])
            assert client.cluster.scheduler.idle_timeout is None
            (of_worker,) = client.run(read).values()
            assert of_worker == read() != [*others.values()]
        assert read() == [*others.values()]
    assert before == {**before, **os.environ}


@pytest.mark.dask
@pytest.mark.slow
def test_a_worker_that_ends_while_it_starts_is_told_in_one_line(monkeypatch):
    monkeypatch.setitem(local_cluster._SETTINGS, "distributed.worker.preload", ["import os; os.abort()"])
    message = r"the worker processes did not start \(.*\); they may lack memory"
    with pytest.raises(WorkersError, match=message), local_client(1, 0, "ended"):
        pass


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "with exit status 0, as by os._exit"),
        (3, "with exit status 3, as by os._exit"),
        (-1, "by SIGHUP"),
        (-9, "by SIGKILL, from outside or for lack of memory"),
    ],
)
def test_how_a_worker_process_ended_is_put_into_words(code, words, monkeypatch):
    monkeypatch.setattr(local_cluster, "_endings", {8: code})
    assert local_cluster.ending_of(8) == words
