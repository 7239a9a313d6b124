"""A user's policy is refused before a run where its distributions are not what acting and learning take them for."""

import re
import sys
from itertools import count
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from metaloom.pipeline.nn.distributions import DiagGaussian
from metaloom.pipeline.nn.spec import Spaces
from metaloom.pipeline.policies import PolicyConfig
from metaloom.pipeline.policies.build import build_policy
from metaloom.pipeline.policies.contract import OwnPolicy
from metaloom.pipeline.schema import ConfigError

SPACES = Spaces((3,), 1.0, 2, 0)


class Gaussian(NamedTuple):
    mean: torch.Tensor
    log_std: torch.Tensor

    def log_prob(self, actions):
        return DiagGaussian(*self).log_prob(actions)

    def kl(self, other):
        return DiagGaussian(*self).kl(DiagGaussian(*other))

    def entropy(self):
        return DiagGaussian(*self).entropy()

    def detach(self):
        return type(self)(self.mean.detach(), self.log_std.detach())

    def sample(self):
        return self.mean + self.log_std.exp() * torch.randn(self.mean.shape)

    def mode(self):
        return self.mean

    def parameters(self):
        return {"mean": self.mean, "log_std": self.log_std.expand(self.mean.shape)}


class Right(OwnPolicy):
    of = Gaussian

    def __init__(self, spaces, config):
        pass

    def initialize(self, rng):
        return {"kernel": rng.standard_normal((3, 2), np.float32), "log_std": np.zeros(2, np.float32)}

    def distribution(self, params, observations):
        return self.of(observations @ params["kernel"], params["log_std"].unsqueeze(-2))

    def recorded(self, behavior):
        return self.of(**behavior)


def with_distribution(**methods):
    return type("Wrong", (Right,), {"of": type("Wrong", (Gaussian,), methods), "__module__": __name__})


def with_policy(**methods):
    return type("Wrong", (Right,), {**methods, "__module__": __name__})


CALLS, GENERATOR = count(), torch.Generator()
WRONG = {
    "returns distributions (Wrong) without mode; expected mode(): the most": with_distribution(mode=None),
    "returns float32[4, 2] in `log_prob` for actions (4, 2); expected (4,): sum over the last axis": with_distribution(
        log_prob=lambda self, actions: torch.distributions.Normal(self.mean, self.log_std.exp()).log_prob(actions)
    ),
    "returns float32[2, 4, 1] in `log_prob of parameters with a task axis`": with_distribution(
        log_prob=lambda self, actions: DiagGaussian(*self).log_prob(actions)[(..., None)[: actions.ndim - 1]]
    ),
    "`sample` of own:Wrong raised ZeroDivisionError": with_distribution(sample=lambda self: 1 / 0),
    "returns float32[4] in `sample` for 4 rows; expected actions (4, 2), floating-point": with_distribution(
        sample=lambda self: self.mean[:, 0]
    ),
    "returns int64[4, 2] in `mode` for 4 rows; expected actions (4, 2)": with_distribution(
        mode=lambda s: s.mean.long()
    ),
    "draws different actions from the same seed of torch's generator": with_distribution(
        sample=lambda self: self.mean + torch.randn(self.mean.shape, generator=GENERATOR)
    ),
    "returns kl of shape (4, 2) for 4 rows; expected (4,)": with_distribution(kl=lambda self, other: self.mean),
    "returns parameters()['log_std'] as float32[1, 2]; expected a tensor (4, ...)": with_distribution(
        parameters=lambda self: self._asdict()
    ),
    "in `recorded` than it acted with (log_prob": with_policy(
        recorded=lambda self, behavior: Gaussian(behavior["mean"], behavior["log_std"] + 1)
    ),
    "in `recorded` than it acted with (log_prob is -": with_policy(
        recorded=lambda self, behavior: Gaussian(behavior["mean"], 2 * behavior["log_std"])
    ),
    "returns the parameter kernel as float64; expected float32": with_policy(
        initialize=lambda s, rng: {"kernel": rng.random(2)}
    ),
    "returns different distributions when called again; expected a function of parameters and": with_policy(
        distribution=lambda self, params, rows: Right.distribution(self, params, rows + next(CALLS))
    ),
    "returns parameters()['heat'] as float32[]; expected a tensor (4, ...)": with_distribution(
        parameters=lambda self: {"heat": torch.ones(())}
    ),
    "returns Tensor in `recorded`; expected distributions, with log_prob": with_policy(
        recorded=lambda self, behavior: behavior["mean"]
    ),
    "draws random numbers in `distribution`; expected random draws only in": with_policy(
        distribution=lambda self, params, rows: Gaussian(rows @ params["kernel"] + torch.randn(()), params["log_std"])
    ),
}


@pytest.fixture
def build(monkeypatch):
    def built(cls):
        monkeypatch.setitem(sys.modules, "own", type(sys)("own"))
        monkeypatch.setattr(sys.modules["own"], "Wrong", cls, raising=False)
        return build_policy(PolicyConfig(name="own:Wrong"), SPACES)

    return built


@pytest.mark.parametrize("sentence", WRONG)
def test_a_policy_that_is_not_what_it_is_taken_for_is_refused_with_what_is_required(build, sentence):
    with pytest.raises(ConfigError) as caught:
        build(WRONG[sentence])
    assert str(caught.value).startswith("policy.name: ")
    assert sentence in str(caught.value)
    cure = ": sum over the last axis"
    assert (cure in str(caught.value)) == (cure in sentence)


def test_both_likelihoods_that_are_told_are_those_of_one_action(build):
    def recorded(self, behavior):
        return SimpleNamespace(log_prob=lambda actions: Gaussian(**behavior).log_prob(actions) + 1)

    with pytest.raises(ConfigError, match="than it acted with") as caught:
        build(with_policy(recorded=recorded))
    found, was = map(float, re.search(r"log_prob is (\S+) but was (\S+)\)", str(caught.value)).groups())
    assert found == pytest.approx(was + 1, abs=1e-4)


def test_a_policy_that_is_what_it_is_taken_for_is_accepted_and_torch_draws_on_where_it_was(build):
    state = torch.get_rng_state()
    assert isinstance(build(Right), Right)
    assert torch.equal(torch.get_rng_state(), state)


class Breaks(Right):
    def __init__(self, spaces, config):
        raise LookupError("no weights")


class Asks(Right):
    def distribution(self, params, observations):
        raise ConfigError("policy.options: got no width; expected one")


def test_a_policy_that_cannot_be_made_is_refused_with_its_error(build):
    with pytest.raises(
        ConfigError, match=r"^policy.name: own:Wrong\(spaces, config\) raised LookupError: .*no weights"
    ):
        build(Breaks)


def test_what_a_policy_refuses_itself_comes_through_as_it_says_it(build):
    with pytest.raises(ConfigError, match=r"^policy.options: got no width; expected one$"):
        build(Asks)
