"""Shapes of the parameters of built-in cells, which workers read without importing torch."""

from metaloom.pipeline.nn.spec import CellSpec, Shapes

CELL = "cell"
"""Prefix of a cell's parameters."""


def cell_shapes(spec: CellSpec) -> Shapes:
    """Return the shapes of a gru's or lstm's parameters in order; a kernel is (in, out), gates side by side."""
    gates = spec.num_gates * spec.hidden_size
    return {
        f"{CELL}.input_kernel": (spec.input_size, gates),
        f"{CELL}.hidden_kernel": (spec.hidden_size, gates),
        f"{CELL}.input_bias": (gates,),
        f"{CELL}.hidden_bias": (gates,),
    }
