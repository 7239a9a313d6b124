"""Settings of the process that decide bits: as runs are computed under while a stage computes, then as they were."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

from metaloom import storage
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import train
from metaloom.flows.graph import changes
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.numerics import normal_numerics, unusual_numerics
from metaloom.storage import StageRef

UNUSUAL = {
    "torch default dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "torch gradients": (torch.set_grad_enabled, False, True),
    "torch deterministic algorithms": (torch.use_deterministic_algorithms, True, False),
    "torch float32 precision": (torch.set_float32_matmul_precision, "medium", "highest"),
    "mkldnn": (lambda on: setattr(torch.backends.mkldnn, "enabled", on), False, True),
    "flush to zero": (torch.set_flush_denormal, True, False),
    "torch default device": (torch.set_default_device, "meta", None),
}


@pytest.fixture
def changed():
    """Changes every setting, as an earlier cell of a notebook may have."""
    threads = torch.get_num_threads()

    def change():
        torch.set_num_threads(3)
        for set_to, value, _ in UNUSUAL.values():
            set_to(value)

    yield change
    for set_to, _, value in UNUSUAL.values():
        set_to(value)
    torch.set_num_threads(threads)


def test_a_process_with_other_settings_trains_the_same_bits_records_them_and_gets_them_back(
    tmp_path, tiny_config, digests, changed
):
    config = tiny_config(iterations=1, policy={"network": "residual", "hidden_sizes": [8]}, evaluation={"every": 1})
    train(config, tmp_path / "usual", backend=Backend(workers=0))
    changed()
    before = unusual_numerics()
    assert before.keys() >= UNUSUAL.keys()
    train(config, tmp_path / "unusual", backend=Backend(workers=0))
    assert unusual_numerics() == before
    assert digests(tmp_path / "unusual") == digests(tmp_path / "usual")
    assert all(outcome.identical for outcome in replay(tmp_path / "usual"))
    usual, unusual = (storage.open_run(tmp_path / name) for name in ("usual", "unusual"))
    ref = StageRef(0, "meta_optimize")
    assert "numerics" not in usual.environment_of(ref)
    assert unusual.environment_of(ref)["numerics"] == before
    assert "torch float32 precision was medium in the process that computed it" in [
        *changes.machine_changes(unusual, ref)
    ]


def test_a_processor_is_told_from_another_by_the_flags_that_only_one_has(monkeypatch):
    run = SimpleNamespace(info={"system": {"cpu_flags": "f e d c b a sse"}}, environment_of=lambda ref: {})
    monkeypatch.setattr(changes, "system", lambda: {"cpu": "absent", "cpu_flags": "sse avx", "libc": "absent"})
    assert next(changes.machine_changes(run, None)) == "a processor without a b c d e and 1 more, with avx"


def test_stages_compute_with_the_usual_settings_whatever_those_of_the_process(changed):
    changed()
    with normal_numerics():
        assert unusual_numerics() == {}
        assert torch.get_num_threads() == 1
        assert {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"} == {1}


def test_what_is_changed_in_a_stage_is_restored_after_it():
    with normal_numerics():
        torch.set_default_dtype(torch.float64)
        np.seterr(all="raise")
    assert torch.get_default_dtype() == torch.float32
    assert np.geterr()["over"] == "warn"


def test_precisions_that_are_set_by_kind_of_product_are_left_and_restored():
    matmul = torch.backends.mkldnn.matmul
    matmul.fp32_precision = "bf16"
    try:
        with normal_numerics():
            assert torch.get_float32_matmul_precision() == "highest"
            assert matmul.fp32_precision in ("ieee", "none")
        assert matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = "none"


def test_rollouts_within_a_stage_that_computes_on_a_gpu_keep_its_settings(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with normal_numerics("cuda"):
        with normal_numerics():
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.backends.cudnn.benchmark
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()


def test_gradients_are_summed_in_the_thread_that_asks_for_them():
    with normal_numerics():
        assert not torch.autograd.is_multithreading_enabled()
    assert torch.autograd.is_multithreading_enabled()


def test_modes_of_a_thread_are_left_and_entered_again():
    with torch.inference_mode(), torch.autocast("cpu"):
        with normal_numerics():
            assert unusual_numerics() == {}
        assert {"torch inference mode", "torch autocast"} <= unusual_numerics().keys()


def test_the_last_of_several_threads_that_compute_restores_what_they_share(changed):
    changed()
    entered, leave, done = threading.Event(), threading.Event(), threading.Event()

    def compute():
        with normal_numerics():
            entered.set()
            leave.wait()
        done.set()

    with normal_numerics():
        other = threading.Thread(target=compute)
        other.start()
        entered.wait()
    assert torch.get_default_dtype() == torch.float32
    leave.set()
    other.join()
    assert done.is_set()
    assert torch.get_default_dtype() == torch.float64
