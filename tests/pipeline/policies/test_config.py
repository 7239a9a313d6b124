import pytest

from metaloom.pipeline.policies.config import EncoderConfig, PolicyConfig


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"options": {"a": 1}}, "name is not set"),
        ({"min_std": 0.5, "init_std": 0.4}, "min_std is 0.5 but init_std is 0.4; use min_std <= init_std"),
        ({"network": "nets:Own", "activation": "relu"}, "activation is relu but network is nets:Own"),
        ({"network": "nets:Own", "output_activation": "tanh"}, "output_activation is tanh but network is nets:Own"),
    ],
)
def test_what_nothing_would_read_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        PolicyConfig(**settings)


def test_layers_of_one_unit_are_sizes_too_and_the_deviation_begins_at_one():
    assert PolicyConfig(hidden_sizes=(1,)).hidden_sizes == (1,)
    assert EncoderConfig(name="mlp", size=1).size == 1
    assert (PolicyConfig().init_std, PolicyConfig().min_std, EncoderConfig(name="mlp").size) == (1.0, 1e-6, 64)


@pytest.mark.parametrize("network", ["gru", "residual"])
def test_an_encoder_is_a_network_that_reads_observations_alone(network):
    with pytest.raises(ValueError, match=f"got {network}; expected cnn, mlp, or module:Class"):
        EncoderConfig(name=network)


def test_the_least_deviation_may_be_the_first():
    assert PolicyConfig(min_std=0.5, init_std=0.5).min_std == 0.5
