import pytest

from metaloom.pipeline.policies.config import PolicyConfig


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"options": {"a": 1}}, "name is not set"),
        ({"network": "nets:Own", "activation": "relu"}, "activation is relu but network is nets:Own"),
        ({"network": "nets:Own", "output_activation": "tanh"}, "output_activation is tanh but network is nets:Own"),
    ],
)
def test_what_nothing_would_read_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        PolicyConfig(**settings)
