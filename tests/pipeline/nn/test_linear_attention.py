"""Linear attention: a memory that adds, over whole sequences as step by step."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from metaloom.pipeline.nn import recurrent
from metaloom.pipeline.nn.cells import CellSpec
from metaloom.pipeline.nn.recurrent import build_cell
from metaloom.pipeline.nn.spec import check_network_settings
from metaloom.pipeline.policies.inference import AttentionInference
from metaloom.pipeline.schema import ConfigError

L, N, INPUTS, HIDDEN, K, V = 7, 3, 4, 5, 3, 2
SPEC = CellSpec("linear-attention", INPUTS, HIDDEN, {"key_size": K, "value_size": V})


def drawn(cell):
    params = cell.initialize(np.random.default_rng(0))
    return {name: torch.tensor(value).double() for name, value in params.items()}


@pytest.mark.parametrize(("name", "hidden_size"), [("gru", 9), ("lstm", 9), ("linear-attention", None)])
def test_kernels_begin_within_one_over_the_root_of_their_inputs_or_of_the_units_of_a_memory(name, hidden_size):
    params = build_cell(CellSpec(name, 25, 9)).initialize(np.random.default_rng(0))
    kernels = [value for value in params.values() if value.size > 200]
    assert len(kernels) > 1
    for kernel in kernels:
        limit = (hidden_size or len(kernel)) ** -0.5
        assert -limit <= kernel.min() < -0.97 * limit
        assert 0.97 * limit < kernel.max() <= limit


@pytest.mark.parametrize("cut", [1, 3, L - 1])
def test_a_sequence_is_its_two_parts_with_the_state_handed_on(cut):
    cell = build_cell(SPEC)
    params, inputs = drawn(cell), torch.randn(L, N, INPUTS, dtype=torch.float64)
    nothing = torch.zeros(N, cell.state_size, dtype=torch.float64)
    whole, end = cell(params, inputs, nothing)
    first, state = cell(params, inputs[:cut], nothing)
    second, last = cell(params, inputs[cut:], state)
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last, end, rtol=1e-12, atol=1e-12)


def test_a_long_trial_is_learned_piece_by_piece_so_that_memory_grows_with_its_length_alone(monkeypatch):
    cell, sizes = build_cell(SPEC), []
    params, inputs = drawn(cell), torch.randn(L, N, INPUTS, dtype=torch.float64, requires_grad=True)
    nothing = torch.zeros(N, cell.state_size, dtype=torch.float64)

    def learned():
        sizes.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            features, end = cell(params, inputs, nothing)
        return features.detach(), end.detach(), *torch.autograd.grad(features.square().sum() + end.sum(), inputs)

    whole, largest = learned(), max(sizes)
    monkeypatch.setattr(recurrent, "ATTENTION_STEPS", 2)
    for part, expected in zip(learned(), whole, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-12)
    assert max(sizes) < largest


def test_a_memory_that_no_machine_has_is_refused_before_it_is_made():
    spec = CellSpec("linear-attention", INPUTS, HIDDEN, {"key_size": 10**6, "value_size": 10**6})
    with pytest.raises(ConfigError, match=r"policy\.network_options: .* \(the memory of a trial has the shape"):
        build_cell(spec).initialize(np.random.default_rng(0))


@pytest.mark.parametrize("size", [1, 1e3, 1e6])
def test_asinh_of_a_memory_of_any_size_is_the_same_in_acting_and_learning(size):
    """In float32, whose rounding of a memory of a million is 0.06: that of asinh y is the relative one of y."""
    cell = build_cell(replace(SPEC, options={**SPEC.options, "reading": "asinh"}))
    params, rng = cell.initialize(np.random.default_rng(0)), np.random.default_rng(1)
    inputs, state = rng.normal(size=(L, N, INPUTS)).astype(np.float32), np.zeros((N, cell.state_size), np.float32)
    state[:, : K * V] = rng.uniform(0.5, 1, (N, K * V)) * size
    learned, _ = cell(
        {name: torch.tensor(value) for name, value in params.items()}, *map(torch.tensor, (inputs, state))
    )
    acting, memory = AttentionInference(cell.spec, {name: value[None] for name, value in params.items()}), state[None]
    for t in range(L):
        features, memory = acting.step(inputs[None, t], memory)
        np.testing.assert_allclose(features[0], learned[t], rtol=1e-5, atol=1e-5)


def test_no_feature_sees_a_later_input():
    cell = build_cell(SPEC)
    params, inputs = drawn(cell), torch.randn(L, N, INPUTS, dtype=torch.float64)
    nothing = torch.zeros(N, cell.state_size, dtype=torch.float64)
    changed = inputs.clone()
    changed[4:] += 1
    before, after = (cell(params, x, nothing)[0] for x in (inputs, changed))
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4], after[4])


@pytest.mark.parametrize(("reading", "read"), [("linear", torch.Tensor.clone), ("asinh", torch.asinh)])
def test_a_memory_that_writes_the_same_everywhere_counts_the_steps(reading, read):
    """With kernels of zeros k = q = 1/K, so after t steps y = qᵀ S = t v / K, which the layers behind hand through."""
    cell = build_cell(replace(SPEC, options={**SPEC.options, "reading": reading}))
    params = {name: torch.zeros(shape) for name, shape in cell.shapes.items()}
    params["cell.value.bias"][0] = 0.5
    params["cell.reading.kernel"][0, 0] = params["cell.features.kernel"][0, 0] = 1
    features, state = cell(params, torch.randn(L, N, INPUTS), torch.zeros(N, cell.state_size))
    expected = torch.arange(1.0, L + 1) * 0.5 / K
    torch.testing.assert_close(features[..., 0], read(expected)[:, None].expand(L, N))
    assert (features[..., 1:] == 0).all()
    torch.testing.assert_close(state[:, : K * V : V], torch.full((N, K), L * 0.5 / K))


def test_options_of_another_name_or_kind_are_refused():
    with pytest.raises(
        ValueError, match=r"network_options: heads: .*; the options of linear-attention are key_size, v"
    ):
        check_network_settings("linear-attention", (8,), {"heads": 2})
    with pytest.raises(ValueError, match=r"key_size: .* greater than or equal to 1; got 0; the options"):
        check_network_settings("linear-attention", (8,), {"key_size": 0})
    for found, hint in (("loud", ""), ("Asinh", r"; did you mean asinh\?"), (None, "")):
        required = rf"reading: .*'linear' or 'asinh'; got {found!r}{hint}; the options"
        with pytest.raises(ValueError, match=required):
            check_network_settings("linear-attention", (8,), {"reading": found})
    with pytest.raises(ValueError, match="a single layer"):
        check_network_settings("linear-attention", (8, 8), {})
