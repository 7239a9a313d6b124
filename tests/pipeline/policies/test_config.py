import pytest

from metaloom.pipeline.policies.config import PolicyConfig


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


def test_the_least_deviation_may_be_the_first():
    assert PolicyConfig(min_std=0.5, init_std=0.5).min_std == 0.5
