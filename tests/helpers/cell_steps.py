"""Recurrent cells one step at a time, written out from their equations: features and the next state."""

from functools import partial

import torch


def gru_step(params, x, h):
    """One input [in] and state [H]."""
    of_input = x @ params["cell.input_kernel"] + params["cell.input_bias"]
    of_hidden = h @ params["cell.hidden_kernel"] + params["cell.hidden_bias"]
    (x_r, x_z, x_n), (h_r, h_z, h_n) = of_input.chunk(3), of_hidden.chunk(3)
    r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
    h = (1 - z) * torch.tanh(x_n + r * h_n) + z * h
    return h, h


def lstm_step(params, x, state):
    h, c = state.chunk(2)
    gates = x @ params["cell.input_kernel"] + params["cell.input_bias"]
    gates = gates + h @ params["cell.hidden_kernel"] + params["cell.hidden_bias"]
    i, f, g, o = gates.chunk(4)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, torch.cat([h, c])


def attention_step(params, x, state, reading=lambda y: y):
    """One input [in], and what is written [K V] with the last input behind it."""

    def layer(name, inputs):
        return inputs @ params[f"cell.{name}.kernel"] + params[f"cell.{name}.bias"]

    places, numbers = (len(params[f"cell.{name}.bias"]) for name in ("key", "value"))
    written, last = state.split([places * numbers, len(x)])
    event = torch.cat([x, last])
    memory = written.reshape(places, numbers)
    memory = memory + torch.outer(layer("key", event).softmax(0), layer("value", layer("event", event).relu()))
    read = reading(layer("query", x).softmax(0) @ memory)
    features = layer("features", layer("reading", torch.cat([read, x])).relu()).relu()
    return features, torch.cat([memory.flatten(), x])


asinh_step = partial(attention_step, reading=lambda y: y.sign() * (y.abs() + (y * y + 1).sqrt()).log())
"""The same where the input reads the inverse of the hyperbolic sine, by its definition."""

TABLE = {"key_size": 3, "value_size": 2}
STEPS = {"gru": gru_step, "lstm": lstm_step, "linear-attention": attention_step, "linear-attention asinh": asinh_step}
"""By the network and, behind it, how it reads its memory."""
OPTIONS = {
    "gru": {},
    "lstm": {},
    "linear-attention": TABLE,
    "linear-attention asinh": {**TABLE, "reading": "asinh"},
}
