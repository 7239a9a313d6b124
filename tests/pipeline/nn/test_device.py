import os

import numpy as np
import pytest
import torch

from metaloom.pipeline.arithmetic import code_for, numpy_facts
from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.device import EQUAL_IN_WORDS, EQUALITY
from metaloom.pipeline.nn import device
from metaloom.pipeline.nn.cells import CellSpec
from metaloom.pipeline.nn.device import device_facts, use_device
from metaloom.pipeline.nn.recurrent import build_cell


def test_the_cpu_is_always_there_and_repeats_bits_everywhere():
    assert use_device("cpu") == torch.device("cpu")
    assert EQUALITY["cpu"] == "bits"
    assert device_facts("cpu") == {}


@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_no_device_but_the_cpu_claims_equal_bits_elsewhere(name):
    assert EQUALITY[name] != "bits"
    assert "identical" not in EQUAL_IN_WORDS[EQUALITY[name]]


@pytest.mark.parametrize(
    ("extensions", "facts"),
    [
        ({"baseline": ["SSE", "SSE2"], "found": ["AVX2", "FMA3"]}, "AVX2 FMA3"),
        ({"baseline": ["SSE", "SSE2"], "found": []}, "SSE SSE2"),
        ({"baseline": ["ASIMD"]}, "ASIMD"),
        ({}, "scalar"),
    ],
)
def test_numpys_instructions_are_those_found_or_else_those_it_was_built_for(extensions, facts, monkeypatch):
    monkeypatch.setattr(np, "show_config", lambda mode: {"SIMD Extensions": extensions} if extensions else {})
    assert numpy_facts.__wrapped__() == facts


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("avx2", {}),
        ("avx2 fma", {"blas": "openblas Haswell", "torch": "AVX2", "numpy": ""}),
        (
            "avx2 fma bmi1 bmi2 f16c movbe avx512f avx512cd avx512bw avx512dq avx512vl",
            {"blas": "openblas Haswell", "torch": "AVX512", "numpy": "X86_V3 X86_V4"},
        ),
    ],
)
def test_the_default_code_of_a_processor_is_what_its_flags_suffice_for(flags, code, monkeypatch):
    extensions = {"found": ["X86_V4"], "not found": ["X86_V3", "AVX512_SPR"]}
    monkeypatch.setattr(np, "show_config", lambda mode: {"SIMD Extensions": extensions})
    assert code_for({*flags.split()}) == code


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match=r"device is cuda, but torch .* finds none here; use one of cpu"):
        use_device("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_is_told_to_be_deterministic_and_recorded():
    use_device("cuda")
    try:
        assert torch.are_deterministic_algorithms_enabled()
        assert device_facts("cuda").keys() == {"model", "capability", "cuda", "cudnn"}
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_recurrent_networks_have_the_same_outputs_and_gradients_on_a_gpu(name):
    cell = build_cell(CellSpec(name, input_size=3, hidden_size=5))
    params, rng = cell.initialize(np.random.default_rng(0)), np.random.default_rng(1)
    inputs = torch.from_numpy(rng.standard_normal((4, 2, 3), np.float32))

    def outputs_and_gradients(on):
        leaves = {key: torch.tensor(value, device=on, requires_grad=True) for key, value in params.items()}
        features, last = cell(leaves, inputs.to(on), inputs.new_zeros(2, cell.state_size).to(on))
        gradients = torch.autograd.grad((features**2).sum() + last.sum(), [*leaves.values()])
        return [value.detach().cpu() for value in (features, last, *gradients)]

    for found, expected in zip(outputs_and_gradients(use_device("cuda")), outputs_and_gradients("cpu"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "workspace"), [("cuda", ":4096:8"), ("mps", None)])
def test_a_device_is_prepared_for_deterministic_algorithms_and_full_precision(name, workspace, monkeypatch):
    monkeypatch.setitem(device._IS_AVAILABLE, name, lambda: True)  # nothing is computed on it
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    flags = [
        (torch.backends.cuda.matmul, "allow_tf32"),
        (torch.backends.cudnn, "allow_tf32"),
        (torch.backends.cudnn, "benchmark"),
    ]
    before = [getattr(*flag) for flag in flags]
    try:
        for flag in flags:
            setattr(*flag, True)
        assert use_device(name) == torch.device(name)
        assert torch.are_deterministic_algorithms_enabled()
        assert [getattr(*flag) for flag in flags] == [False, False, False]
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == workspace
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        for flag, value in zip(flags, before, strict=True):
            setattr(*flag, value)


def test_a_device_is_told_with_what_its_results_depend_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "MODEL")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert device_facts("cuda") == {"model": "MODEL", "capability": "9.0", "cuda": "12.8", "cudnn": "91002"}
    assert (device_facts("mps"), device_facts("cpu")) == ({"model": "Metal"}, {})
