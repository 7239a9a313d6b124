"""Fused updates of plain multilayer perceptrons on the CPU, with hand-written derivatives."""
