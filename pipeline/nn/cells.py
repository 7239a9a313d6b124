"""Shapes of the parameters of built-in cells, which workers read without importing torch."""

from metaloom.pipeline.nn.spec import LINEAR_ATTENTION, CellSpec, Shapes

CELL = "cell"
"""Prefix of a cell's parameters."""


def cell_shapes(spec: CellSpec) -> Shapes:
    """Return the shapes of a built-in cell's parameters in order; a kernel is (in, out), gates side by side."""
    return _attention_shapes(spec) if spec.name == LINEAR_ATTENTION else _gated_shapes(spec)


def _gated_shapes(spec: CellSpec) -> Shapes:
    gates = spec.num_gates * spec.hidden_size
    return {
        f"{CELL}.input_kernel": (spec.input_size, gates),
        f"{CELL}.hidden_kernel": (spec.hidden_size, gates),
        f"{CELL}.input_bias": (gates,),
        f"{CELL}.hidden_bias": (gates,),
    }


def _attention_shapes(spec: CellSpec) -> Shapes:
    N, H, sizes = spec.input_size, spec.hidden_size, spec.attention
    layers = {
        "event": (2 * N, H),
        "value": (H, sizes.value_size),
        "key": (2 * N, sizes.key_size),
        "query": (N, sizes.key_size),
        "reading": (sizes.value_size + N, H),
        "features": (H, H),
    }
    shapes: Shapes = {}
    for name, (size_in, size_out) in layers.items():
        shapes[f"{CELL}.{name}.kernel"] = (size_in, size_out)
        shapes[f"{CELL}.{name}.bias"] = (size_out,)
    return shapes
