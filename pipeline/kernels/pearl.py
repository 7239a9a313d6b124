"""PEARL's gradient steps for plain relu networks on the CPU, from derivatives that are written down.

A step's tasks are dealt into fixed parts, which threads work on at the same time; parts are summed in a fixed order,
so bits do not depend on the number of threads. Q(o, a', z) is evaluated once for both losses of the actor, only the
lower Q-value of a row is followed back to its action, and first layers go back to z or the action alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from metaloom.pipeline.algorithms.off_policy.learner import GradientSteps
from metaloom.pipeline.algorithms.pearl.definition import ADAM_EPSILON, Noise
from metaloom.pipeline.algorithms.pearl.networks import TRAINED, PEARLArrays
from metaloom.pipeline.algorithms.pearl.settings import PEARL
from metaloom.pipeline.kernels.pearl_part import Part, PosteriorArrays, context_features, inference
from metaloom.pipeline.nn.flat_networks import FlatDescent, FlatNetwork, FlatParams
from metaloom.pipeline.nn.spec import layer_names
from metaloom.pipeline.types import Array, LearnerState, Metrics, Minibatch, ParallelMap, Params, Transitions

MAX_PARTS = 4
"""Parts of equal size that a gradient step's tasks are dealt into. Fixed: the order of sums depends on it."""
PARTS = ("kernel", "bias")


class PEARLKernel(GradientSteps[Noise]):
    """Working copies of a learner's networks and optimizers while gradient steps change them."""

    def __init__(
        self,
        settings: PEARL,
        state: LearnerState,
        *,
        discount: float,
        learning_rates: Mapping[str, float],
        parallel: ParallelMap = map,
    ) -> None:
        self._settings, self._discount, self._parallel = settings, discount, parallel
        self._learning_rates, arrays = learning_rates, PEARLArrays.of(state)
        self._num_updates = arrays.num_updates
        self._layers = {name: layers_of(params) for name, params in arrays.params.items()}
        self.params: dict[str, FlatParams] = {name: in_layer_order(params) for name, params in arrays.params.items()}
        self._descent = {
            name: FlatDescent(settings.optimizer.name, self.params[name], kept, epsilon=ADAM_EPSILON)
            for name, kept in arrays.optimizers.items()
        }
        self._parts: list[Part] = []
        self._shape: tuple[int, ...] = ()

    def step(self, minibatch: Minibatch, noise: Noise) -> Metrics:
        """Make one gradient step; returns means over its transitions, and of kl and latent_std over its tasks.

        The same as PEARLDefinition.step.
        """
        assert minibatch.context is not None
        shape = (*minibatch.transitions.rewards.shape, minibatch.context.rewards.shape[1])
        if shape != self._shape:
            self._shape, num_parts = shape, min(MAX_PARTS, shape[0])
            bounds = [shape[0] * i // num_parts for i in range(num_parts + 1)]
            self._parts = [
                Part(self._settings, self._discount, self.params, self._layers, minibatch, slice(start, stop))
                for start, stop in pairwise(bounds)
            ]
        sums = self._over_parts(lambda part: part.critic_gradients(minibatch, noise))
        self._descend(("q1", "q2", "encoder"))
        sums |= self._over_parts(lambda part: part.actor_gradients(minibatch, noise))
        self._descend(("v", "policy"))
        tau, target = self._settings.soft_target_tau, self.params["target_v"].vector
        target *= 1 - tau
        target += tau * self.params["v"].vector
        K, N, _ = self._shape
        return {name: value / (K if name in ("kl", "latent_std") else K * N) for name, value in sums.items()}

    def state(self) -> LearnerState:
        params = {name: flat.copies() for name, flat in self.params.items()}
        optimizers = {name: descent.state for name, descent in self._descent.items()}
        return PEARLArrays(params, optimizers, self._num_updates + 1).state()

    @property
    def gradients(self) -> dict[str, Array]:
        """Gradients of the last step by network, as vectors."""
        return {name: self.params[name].gradient for name in TRAINED}

    def _over_parts(self, gradients: Callable[[Part], Metrics]) -> Metrics:
        by_part = list(self._parallel(gradients, self._parts))
        return {name: sum(part[name] for part in by_part) for name in by_part[0]}

    def _descend(self, names: Sequence[str]) -> None:
        def descend(name: str) -> None:
            flat = self.params[name]
            np.copyto(flat.gradient, self._parts[0].params[name].gradient)
            for part in self._parts[1:]:
                flat.gradient += part.params[name].gradient
            self._descent[name].step(self._learning_rates[name])

        for _ in self._parallel(descend, names):
            pass


def infer(settings: PEARL, encoder: Params, context: Transitions) -> PosteriorArrays:
    """Return the posterior of every task given its context [B, C], [B, Z], from an encoder's parameters."""
    network = FlatNetwork(in_layer_order(encoder), layers_of(encoder), "relu", fold_bias=True)
    posterior_of = inference(settings.use_information_bottleneck)
    posteriors: list[PosteriorArrays] = []
    # Task by task: the bits of one must not depend on how many others there are.
    for b in range(len(context.rewards)):
        outputs = network.forward(*context_features(settings, context, slice(b, b + 1)))
        posteriors.append(posterior_of.infer(outputs[None]))
    return PosteriorArrays(*(np.concatenate([getattr(p, name) for p in posteriors]) for name in ("mean", "variance")))


def layers_of(params: Mapping[str, Array]) -> list[str]:
    """Return the names of the layers of a multilayer perceptron with these parameters."""
    return layer_names(len(params) // 2 - 1)


def in_layer_order(params: Mapping[str, Array]) -> FlatParams:
    """Return parameters with every bias right after its kernel."""
    return FlatParams({f"{layer}.{part}": params[f"{layer}.{part}"] for layer in layers_of(params) for part in PARTS})
