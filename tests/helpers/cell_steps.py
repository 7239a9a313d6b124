"""Recurrent cells one step at a time, written out from their equations."""

import torch


def gru_step(params, x, h):
    """One input [in] and state [H], by the equations of the class's docstring."""
    of_input = x @ params["cell.input_kernel"] + params["cell.input_bias"]
    of_hidden = h @ params["cell.hidden_kernel"] + params["cell.hidden_bias"]
    (x_r, x_z, x_n), (h_r, h_z, h_n) = of_input.chunk(3), of_hidden.chunk(3)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    return (1 - z) * torch.tanh(x_n + r * h_n) + z * h


def lstm_step(params, x, state):
    h, c = state.chunk(2)
    gates = x @ params["cell.input_kernel"] + params["cell.input_bias"]
    gates = gates + h @ params["cell.hidden_kernel"] + params["cell.hidden_bias"]
    i, f, g, o = gates.chunk(4)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.cat([torch.sigmoid(o) * torch.tanh(c), c])
