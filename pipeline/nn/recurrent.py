"""Recurrent networks as functions of explicit parameters: built-in and custom cells."""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from metaloom.pipeline.memory import require_room
from metaloom.pipeline.nn import modules
from metaloom.pipeline.nn.cells import ATTENTION_STEPS, CELL, ENCODER, LINEAR_ATTENTION, BuiltInCell, CellSpec
from metaloom.pipeline.nn.cells import GRU as GRU_NAME
from metaloom.pipeline.nn.cells import LSTM as LSTM_NAME
from metaloom.pipeline.nn.modules import ModuleCopies, learned_parameters, seeded
from metaloom.pipeline.nn.networks import build_network
from metaloom.pipeline.nn.spec import NETWORKS, NetworkSpec, of_encoder
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import Params, Shapes


class LinearAttention(BuiltInCell):
    """Linear attention over the steps of a trial, Katharopoulos et al. 2020, arXiv:2006.16236, eq. 16 to 20.

    The last two inputs u = (x, previous x) determine a key k = softmax(u K) over K slots and a value v = relu(u E) V,
    which are written to the memory: S' = S + k vᵀ. A query q = softmax(x Q) then reads y = qᵀ S', and the features are
    relu(relu((y, x) R) F). With `reading: asinh`, asinh y replaces y. All layers have biases. The state is (S, x). See
    Cell.

    Unlike in eq. 20, y is not divided by a sum of keys, so the memory can count. As a result, y and its sensitivity to
    the parameters grow with each similar step, whereas asinh y hardly grows.
    """

    def initialize(self, rng: np.random.Generator) -> Params:
        """Draw kernels and biases from U(±1/√in), as torch does."""
        sizes = self.spec.attention
        memory = {"the memory of a trial": (sizes.key_size, sizes.value_size)}
        require_room(self.shapes | memory, setting="policy.hidden_sizes or policy.network_options")
        params: Params = {}
        for name, shape in self.shapes.items():
            limit = 1 / np.sqrt(self.shapes[f"{name.rpartition('.')[0]}.kernel"][0])
            params[name] = rng.uniform(-limit, limit, shape).astype(np.float32)
        return params

    def __call__(self, params: Mapping[str, Tensor], inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Process blocks of steps, computing all pairs within a block and passing the state on."""
        features: list[Tensor] = []
        for part in inputs.split(ATTENTION_STEPS):
            of_part, state = self._together(params, part, state)
            features.append(of_part)
        return torch.cat(features), state

    def _together(self, params: Mapping[str, Tensor], inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return a block's features and final state, computed from all pairs of steps; later steps have weight 0."""
        sizes = self.spec.attention
        written, last = state.split([state.shape[-1] - inputs.shape[-1], inputs.shape[-1]], -1)
        memory = written.unflatten(-1, (sizes.key_size, sizes.value_size))

        def layer(name: str, x: Tensor) -> Tensor:
            return x @ params[f"{CELL}.{name}.kernel"] + params[f"{CELL}.{name}.bias"]

        events = torch.cat([inputs, torch.cat([last.unsqueeze(0), inputs[:-1]])], -1)
        values = layer("value", torch.relu(layer("event", events))).transpose(0, 1)  # [N, L, V]
        keys = torch.softmax(layer("key", events), -1).transpose(0, 1)  # [N, L, K]
        queries = torch.softmax(layer("query", inputs), -1).transpose(0, 1)  # [N, L, K]
        read = torch.tril(queries @ keys.mT) @ values + queries @ memory
        if sizes.reading == "asinh":
            read = torch.asinh(read)
        features = layer("reading", torch.cat([read.transpose(0, 1), inputs], -1))
        features = torch.relu(layer("features", torch.relu(features)))
        memory = memory + keys.mT @ values
        return features, torch.cat([memory.flatten(1), inputs[-1]], -1)


class Cell(Protocol):
    """Recurrent network as a function of explicit parameters."""

    @property
    def spec(self) -> CellSpec: ...

    @property
    def shapes(self) -> Shapes: ...  # parameter name -> shape, in order

    @property
    def state_size(self) -> int: ...  # S; the state is zero at the beginning of a sequence

    @property
    def feature_size(self) -> int: ...  # number F of features per input

    def initialize(self, rng: np.random.Generator) -> Params:
        """Draw initial float32 parameters; return arrays keyed by name, in order."""
        ...

    def __call__(self, params: Mapping[str, Tensor], inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [L, N, F] and final states [N, S] for N sequences of inputs [L, N, in] and initial states."""
        ...


class GRU(BuiltInCell):
    """Gated recurrent unit, Cho et al. 2014, arXiv:1406.1078, with the reset gate after the product, as in torch.

    r = σ(x Wᵣ + bᵣ + h Uᵣ + cᵣ), z likewise, n = tanh(x Wₙ + bₙ + r (h Uₙ + cₙ)), h' = (1 - z) n + z h. See Cell.
    """

    def initialize(self, rng: np.random.Generator) -> Params:
        """Draw all parameters from U(±1/√H), as torch does."""
        require_room(self.shapes, setting="policy.hidden_sizes")
        limit = 1 / np.sqrt(self.spec.hidden_size)
        return {name: rng.uniform(-limit, limit, shape).astype(np.float32) for name, shape in self.shapes.items()}

    def __call__(self, params: Mapping[str, Tensor], inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run torch's kernel, which adds no overhead to its matrix products."""
        # nn.GRU calls torch.gru, but the type stubs lack it.
        run = cast(Callable[..., tuple[Tensor, Tensor]], torch.gru)  # pyright: ignore
        features, last = run(inputs, state.unsqueeze(0).contiguous(), *_as_torch(params))
        return features, last[0]


class LSTM(GRU):
    """Long short-term memory, Hochreiter and Schmidhuber 1997, with a forget gate. See Cell.

    i, f, o = σ(x W + b + h U + c) with separate weights, g = tanh(...); c' = f c + i g, h' = o tanh(c'). State: (h, c).
    """

    def __call__(self, params: Mapping[str, Tensor], inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        run = cast(Callable[..., tuple[Tensor, Tensor, Tensor]], torch.lstm)  # pyright: ignore
        before = [part.unsqueeze(0).contiguous() for part in state.chunk(2, -1)]
        features, hidden, cell = run(inputs, before, *_as_torch(params))
        return features, torch.cat([hidden[0], cell[0]], -1)


def _as_torch(params: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Return a cell's parameters in torch's order, and the other arguments of torch.gru and torch.lstm.

    The latter mean: with biases, one layer, no dropout, training mode (only on a GPU), unidirectional, time first.
    """
    kernels = [params[f"{CELL}.{name}"].t() for name in ("input_kernel", "hidden_kernel")]
    on_gpu = kernels[0].is_cuda
    if on_gpu:  # cuDNN needs contiguous kernels, and differentiates only in training
        kernels = [kernel.contiguous() for kernel in kernels]
    biases = [params[f"{CELL}.{name}"] for name in ("input_bias", "hidden_bias")]
    return [*kernels, *biases], True, 1, 0.0, on_gpu, False, False


class ModuleCell:
    """Cell that wraps a custom module, constructed as Class(input_size, **options). See Cell.

    The module has attributes `state_size` and `feature_size`, and maps float32 inputs [N, in] and states [N, S] to
    features [N, F] and next states [N, S]. Its outputs must not depend on any other state. It may have constant buffers
    and frozen parameters, as in ModuleNetwork. If it has a method `sequence` that maps inputs [L, N, in] and states
    [N, S] to features [L, N, F] and final states [N, S], learning calls this method.
    """

    def __init__(self, spec: CellSpec) -> None:
        self.spec = spec
        try:
            self._class: Any = NETWORKS.find(spec.name, nn.Module)
        except ConfigError as problem:
            raise ConfigError(f"policy.network: {problem}") from problem
        modules.require_room_for(lambda: self._construct(0))
        self._module = self._construct(0)
        self._copies = ModuleCopies(_Along(self._module))
        self.state_size: int = self._size("state_size")
        self.feature_size: int = self._size("feature_size")
        # Check that the module is a rowwise function of its parameters, inputs and states.
        modules.require_learnable(self._module, spec.name)
        with seeded(0):
            inputs = [torch.rand(4, size) for size in (spec.input_size, self.state_size)]
            modules.require_function(self._module, spec.name, inputs, self._check_outputs)
        if _offers_sequence(self._module):
            _require_same_sequence(self._class, spec.name, spec.input_size, json.dumps(dict(spec.options)))

    @property
    def shapes(self) -> Shapes:
        return {f"{CELL}.{name}": tuple(value.shape) for name, value in learned_parameters(self._module).items()}

    def initialize(self, rng: np.random.Generator) -> Params:
        module = self._construct(int(rng.integers(2**63)))
        return {f"{CELL}.{name}": value.detach().numpy().copy() for name, value in learned_parameters(module).items()}

    def __call__(self, params: Mapping[str, Tensor], inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        module, parameters = self._copies.like(inputs)
        return functional_call(module, {name: params[name] for name in parameters}, (inputs, state))

    def _construct(self, seed: int) -> nn.Module:
        try:
            with seeded(seed):
                return self._class(self.spec.input_size, **self.spec.options)
        except Exception as problem:
            raise ConfigError(
                f"policy.network: {self.spec.name}({self.spec.input_size}, ...) raised {type(problem).__name__}: "
                f"{problem}; the class of a network with a memory is called with (input_size), and with "
                "policy.network_options by keyword"
            ) from problem

    def _size(self, name: str) -> int:
        size = getattr(self._module, name, None)
        if not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"policy.network: {self.spec.name}.{name} is {size!r}; expected integers state_size and "
                "feature_size, the sizes of its state and of its features"
            )
        return size

    def _check_outputs(self, outputs: Any) -> None:
        expected = [(4, self.feature_size), (4, self.state_size)]
        if (found := _shapes(outputs)) != expected:
            raise ConfigError(
                f"policy.network: {self.spec.name} returned {found}; expected features and states {expected}"
            )
        if dtypes := {part.dtype for part in outputs} - {torch.float32}:
            raise ConfigError(f"policy.network: {self.spec.name} returns outputs of {dtypes.pop()}; expected float32")


def _shapes(outputs: Any) -> list[object]:
    """Return the shape of each output of a custom cell, or the type of an output that is not a tensor."""
    parts: tuple[Any, ...] = tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
    return [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]


def _offers_sequence(cell: nn.Module) -> bool:
    """Return True if the cell's class has a method `sequence`."""
    return callable(getattr(type(cell), "sequence", None))


class _Along(nn.Module):
    """Custom cell applied to sequences [L, N, in]; its parameters have the same names as in a policy."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, inputs: Tensor, state: Tensor, *, step_by_step: bool = False) -> tuple[Tensor, Tensor]:
        # A single input is a step in acting, which must be bitwise identical to calling the cell.
        if not step_by_step and len(inputs) > 1 and _offers_sequence(self.cell):
            return self.cell.sequence(inputs, state)
        features: list[Tensor] = []
        for rows in inputs:
            of_rows, state = self.cell(rows, state)
            features.append(of_rows)
        return torch.stack(features), state


_SAME = 1e-6  # tolerance between `sequence` and single steps in float64: absolute for values up to 1, relative above
_SIZES = ((2, 4), (3, 1), (70, 4), (259, 3))
"""Numbers of steps and rows to compare: odd and even, a single row, and sequences longer than blocks of 64 or 256."""
_ALL_TAKE = 3
"""Sequence length that every cell must support. Longer sequences are compared only if single steps support them."""


@lru_cache(maxsize=16)
def _require_same_sequence(factory: Any, name: str, input_size: int, options: str) -> None:
    """Raise ConfigError if the results or gradients of a cell's `sequence` differ from those of single steps."""
    with seeded(0):
        along = _Along(factory(input_size, **json.loads(options))).double()
        learned = [*learned_parameters(along).values()]
        with torch.no_grad():
            for value in learned:  # initial values may be zero, where some mistakes do not show
                # Use small perturbations in wide layers, or rounding errors would grow from step to step.
                value += 0.1 * torch.randn_like(value) / max(value.shape, default=1) ** 0.5
        for length, rows in _SIZES:
            inputs = torch.randn(length, rows, input_size, dtype=torch.float64)
            inputs[..., -1] = (inputs[..., -1] > 0.5).double()  # ends of episodes
            for state in (torch.zeros, torch.randn):
                before = state(rows, along.cell.state_size, dtype=torch.float64)
                given = [part.clone() for part in (inputs, before)]
                try:
                    with _explained(f"{name}, called step by step,", given):
                        expected = along(*given, step_by_step=True)
                        weights = [torch.rand_like(part) for part in expected]
                        required = _gradients(learned, expected, weights)
                except ConfigError:
                    if length > _ALL_TAKE:
                        return
                    raise
                given = [part.clone() for part in (inputs, before)]
                unlike = f", unlike {length} single steps," if length > _ALL_TAKE else ""
                with _explained(f"{name}.sequence{unlike}", given):
                    found = along(*given)
                shapes = [tuple(part.shape) for part in expected]
                if (of_sequence := _shapes(found)) != shapes:
                    raise ConfigError(f"policy.network: {name}.sequence returned {of_sequence}; expected {shapes}")
                for what, part, as_given in zip(("inputs", "states"), given, (inputs, before), strict=True):
                    if not torch.equal(part, as_given):
                        raise ConfigError(
                            f"policy.network: {name}.sequence modifies its {what} in place, which other code reads; "
                            "return a copy, such as inputs * 2 or state.clone()"
                        )
                _require_same(f"{name}.sequence returned", ("features", "states"), found, expected)
                with _explained(f"the gradient of {name}.sequence", given):
                    gradients = _gradients(learned, found, weights)
                names = [f"the gradient of {path.removeprefix('cell.')}" for path in learned_parameters(along)]
                _require_same(f"by {name}.sequence", names, gradients, required)


@contextmanager
def _explained(what: str, given: Sequence[Tensor]) -> Generator[None]:
    """Convert errors that a cell raises within the block to ConfigErrors about the settings."""
    try:
        yield
    except Exception as problem:
        inputs, states = (tuple(part.shape) for part in given)
        raise ConfigError(
            f"policy.network: {what} raised {type(problem).__name__} on inputs of shape {inputs} and states of shape "
            f"{states}, both float64: {problem}"
        ) from problem


def _gradients(learned: list[nn.Parameter], parts: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    loss = torch.stack([(part * weight).sum() for part, weight in zip(parts, weights, strict=True)]).sum()
    if not loss.requires_grad:
        return [torch.zeros_like(value) for value in learned]
    return [*torch.autograd.grad(loss, learned, allow_unused=True, materialize_grads=True)]


def _require_same(what: str, names: Sequence[str], found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for name, one, other in zip(names, found, expected, strict=True):
        off = (one - other).abs() / other.abs().clamp(min=1)
        if not (off <= _SAME).all():
            at = tuple(int(i) for i in np.unravel_index(int(off.nan_to_num(torch.inf).argmax()), off.shape))
            raise ConfigError(
                f"policy.network: {what} {name} {one[at]:.9g} at {at}, but step by step {other[at]:.9g}; they must "
                f"agree to {_SAME:g}"
            )


class EncodedCell:
    """Recurrent cell preceded by an encoder of the observations, which come first in each input."""

    def __init__(self, spec: CellSpec, encoder: NetworkSpec) -> None:
        self.spec: CellSpec = spec
        self._cell = build_cell(replace(spec, encoder=None))
        with of_encoder():
            self._encoder = build_network(ENCODER, encoder)
        self.state_size: int = self._cell.state_size
        self.feature_size: int = self._cell.feature_size

    @property
    def shapes(self) -> Shapes:
        return {**self._encoder.shapes, **self._cell.shapes}

    def initialize(self, rng: np.random.Generator) -> Params:
        return self._encoder.initialize(rng) | self._cell.initialize(rng)

    def __call__(self, params: Mapping[str, Tensor], inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        observations, rest = inputs.tensor_split([self._encoder.spec.input_size], -1)
        encoded = self._encoder(params, observations.flatten(0, 1)).unflatten(0, inputs.shape[:2])
        return self._cell(params, torch.cat([encoded, rest], -1), state)


@contextmanager
def differentiable_twice() -> Generator[None]:
    """Within the block, disable cuDNN's recurrent kernels, since they have no second derivatives."""
    with torch.backends.cudnn.flags(enabled=False, benchmark=False, deterministic=True, allow_tf32=False):
        yield


def build_cell(spec: CellSpec) -> Cell:
    """Build the recurrent network that a spec describes, or raise ConfigError if it violates the contract of Cell."""
    if spec.encoder is not None:
        return EncodedCell(spec, spec.encoder)
    built_in: Mapping[str, type[Cell]] = {GRU_NAME: GRU, LSTM_NAME: LSTM, LINEAR_ATTENTION: LinearAttention}
    return built_in.get(spec.name, ModuleCell)(spec)
