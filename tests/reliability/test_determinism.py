"""The same bits from one core or four, whatever BLAS and torch are told (T17); Dask and Prefect: tests/flows."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import metaloom.flows.graph.run_stages

SIZES = {"num_tasks": 6, "max_episode_steps": 30, "policy": {"hidden_sizes": [64, 64]}}
TRAIN = """
import json, sys
from pathlib import Path
import torch
from metaloom.flows.commands.train import train
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.run import build_config
torch.set_num_threads(int(sys.argv[1]))
train(build_config(json.loads(sys.argv[3])), Path(sys.argv[2]), backend=Backend(workers=0))
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory, train_tiny, digests):
    return digests(train_tiny(tmp_path_factory.mktemp("expected") / "run", **SIZES))


@pytest.mark.parametrize("cores", [1, 4])
def test_the_number_of_cores_changes_no_digest(tmp_path, train_tiny, digests, expected, monkeypatch, cores):
    monkeypatch.setattr(metaloom.flows.graph.run_stages, "usable_cores", lambda: cores)
    assert digests(train_tiny(tmp_path / "run", **SIZES)) == expected


def test_the_order_in_which_threads_finish_changes_no_digest(tmp_path, train_tiny, digests, expected, monkeypatch):
    class Backwards(ThreadPoolExecutor):
        def map(self, work, *items, **named):
            done = {i: work(*item) for i, item in reversed(list(enumerate(zip(*items, strict=True))))}
            return iter([done[i] for i in sorted(done)])

    monkeypatch.setattr(metaloom.flows.graph.run_stages, "ThreadPoolExecutor", Backwards)
    assert digests(train_tiny(tmp_path / "run", **SIZES)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("threads", [pytest.param("1", marks=pytest.mark.sweep), "4"])
def test_what_blas_and_torch_are_told_of_threads_changes_no_digest(tmp_path, digests, expected, tiny_json, threads):
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    command = [sys.executable, "-c", TRAIN, threads, str(tmp_path / "run"), tiny_json(**SIZES)]
    subprocess.run(command, check=True, env={**os.environ, **dict.fromkeys(names, threads)})
    assert digests(tmp_path / "run") == expected
