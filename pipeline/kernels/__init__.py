"""Fused updates of plain multilayer perceptrons on the CPU, from hand-written derivatives."""
