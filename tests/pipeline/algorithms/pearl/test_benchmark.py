"""The benchmark runs, and its torch step learns what ours does."""

import importlib.util
import re
import sys

import pytest
import torch

from metaloom.pipeline.algorithms.pearl.learner import PEARLDefinition


@pytest.fixture
def benchmark(pytestconfig, monkeypatch):
    spec = importlib.util.spec_from_file_location(
        "pearl_update", pytestconfig.rootpath / "benchmarks" / "pearl_update.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def test_the_benchmark_compares_and_times_both(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pearl_update.py", "--quick", "--threads", "1"])
    benchmark.main()
    assert re.search(r"torch / fused \(cpu\): [\d.]+ of medians", capsys.readouterr().out)


def test_it_refuses_to_compare_different_things(benchmark, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(PEARLDefinition, "step", lambda self, minibatch, noise: {})
    with pytest.raises(SystemExit, match="apart after one step"):
        benchmark._compare(benchmark.Size(5, 2, 4, 8, 6, (16, 16), (8, 8)))


def test_work_is_counted_as_by_hand(benchmark):
    # One hidden layer of one unit everywhere, O = A = Z = 1, one task of one row and one transition of context:
    # encoder 3-1-2: 2 * (2 * 5 + 2); policy 2-1-2: 2 * (2 * 4 + 2); V 2-1-1: 2 * (3 * 3 + 1); Q 3-1-1: 2 * (6 * 4 + 3).
    size = benchmark.Size(1, 1, 1, 1, 1, (1,), (1,))
    assert benchmark.gflop(size, 1) == pytest.approx(1e-9 * 2 * (12 + 10 + 10 + 27))
