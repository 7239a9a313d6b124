import numpy as np
import pytest
import torch
from pydantic import ValidationError

from metaloom.pipeline.config.input import ConfigError
from metaloom.pipeline.nn.optimization import OptimizerConfig
from metaloom.pipeline.nn.torch_optimizers import TorchOptimizer, TorchOptimizerSteps


@pytest.fixture
def params():
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("a", (3, 4)), ("b", (4,)))}


def gradients_of(params, step):
    rng = np.random.default_rng(step)
    return {name: rng.standard_normal(value.shape).astype(np.float32) for name, value in params.items()}


def by_torch(name, options, params, num_steps):
    tensors = {key: torch.from_numpy(value.copy()) for key, value in params.items()}
    optimizer = getattr(torch.optim, name)(list(tensors.values()), **options)
    for step in range(num_steps):
        for key, gradient in gradients_of(params, step).items():
            tensors[key].grad = torch.from_numpy(gradient)
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.step()
    return {key: value.numpy() for key, value in tensors.items()}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adam", {"betas": [0.8, 0.9]}),
        ("AdamW", {"weight_decay": 0.1, "amsgrad": True}),
        ("rmsprop", {"momentum": 0.5, "centered": True}),
        ("sgd", {}),
        ("SGD", {"momentum": 0.9, "dampening": 0.5}),
        ("Adagrad", {}),
        ("Adafactor", {}),
        ("NAdam", {}),
        ("Rprop", {}),
    ],
)
def test_steps_with_a_state_of_arrays_are_those_of_torch(params, name, options):
    config = OptimizerConfig(name=name, options=options)
    stepped, state = params, TorchOptimizerSteps(config, 1.0).initialize(params)
    names = {key: (value.shape, value.dtype) for key, value in state.items()}
    for step in range(4):
        steps = TorchOptimizerSteps(config, 0.1 / (step + 1))
        stepped, state = steps.step(stepped, gradients_of(params, step), state)
        assert {key: (value.shape, value.dtype) for key, value in state.items()} == names
        assert state["step_count"] == step + 1

    expected = by_torch(config.torch_name, options, params, 4)
    assert all(np.array_equal(stepped[key], expected[key]) for key in params)


def test_tensors_change_in_place_and_arrays_do_not(params):
    before = {name: value.copy() for name, value in params.items()}
    vector = np.zeros(5, np.float32)
    TorchOptimizer(OptimizerConfig(name="sgd"), {"all": torch.from_numpy(vector)}).step({"all": torch.ones(5)}, 0.5)
    steps = TorchOptimizerSteps(OptimizerConfig(name="sgd"), 1.0)
    stepped, _ = steps.step(params, {"a": params["a"]}, steps.initialize({"a": params["a"]}))

    assert vector.tolist() == [-0.5] * 5
    assert not stepped["a"].any()
    assert stepped["b"] is params["b"]
    assert all(np.array_equal(params[name], before[name]) for name in params)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "AdamX"}, "use one of adam, rmsprop, sgd, .*; did you mean Adam"),
        ({"name": "adamw"}, r"did you mean AdamW\?$"),
        ({"name": "LBFGS"}, "closure"),
        ({"name": "SparseAdam"}, "dense gradients"),
        ({"name": "Muon"}, "2D parameters"),
        ({"name": "Adam", "options": {"beta": 0.9}}, "unexpected keyword argument 'beta'"),
        ({"name": "Adam", "options": {"eps": -1.0}}, "Invalid epsilon"),
    ],
)
def test_what_torch_refuses_is_refused_before_the_first_update(params, config, message):
    with pytest.raises(ConfigError, match=message):
        TorchOptimizerSteps(OptimizerConfig(**config), 1.0).initialize(params)


def test_the_step_size_is_no_option():
    with pytest.raises(ValidationError, match="lr is the algorithm's own setting"):
        OptimizerConfig.model_validate({"name": "Adam", "options": {"lr": 0.1}})
