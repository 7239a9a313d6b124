"""Actor for custom policies, in torch."""

import numpy as np

from metaloom.pipeline.nn.modules import seeded
from metaloom.pipeline.policies.actors.contract import Actor, ActorSetup
from metaloom.pipeline.policies.build import build_own_policy
from metaloom.pipeline.policies.torch_inference import PaddedRows, reproducible_inference
from metaloom.pipeline.types import Array


class OwnPolicyActor(Actor):
    """Actor that samples from a custom policy's distributions, with a separate seed per task and step. See Actor.

    If `rngs` is None, it takes the distributions' modes.
    """

    def __init__(self, setup: ActorSetup) -> None:
        super().__init__(setup)
        self._policy = build_own_policy(setup.config, setup.spaces)
        self._rows = PaddedRows(setup.params.params, setup.num_rows, setup.spaces.observation_size)
        self._seeds: Array | None = None
        if setup.rngs is not None:
            self._seeds = np.stack([rng.integers(2**63, size=len(setup.taken)) for rng in setup.rngs], axis=1)

    def act(self, t: int, observations: Array, rows: Array) -> Array:
        self._rows.inputs[:] = observations.reshape(self._rows.inputs.shape)
        found: list[tuple[Array, dict[str, Array]]] = []
        with reproducible_inference():
            for b, (params, inputs) in enumerate(self._rows):
                distribution = self._policy.distribution(params, inputs)
                if self._seeds is None:
                    drawn = distribution.mode()
                else:
                    with seeded(int(self._seeds[t, b])):
                        drawn = distribution.sample()
                # Keep all rows, including those whose episode has ended, but not the padding.
                num_rows, parameters = self._rows.inputs.shape[1], distribution.parameters()
                behavior = {name: value.numpy()[:num_rows] for name, value in parameters.items()}
                found.append((drawn.numpy()[:num_rows], behavior))
        actions = np.concatenate([actions for actions, _ in found])[rows]
        self._take(t, rows, actions)
        for name in found[0][1]:
            values = np.concatenate([behavior[name] for _, behavior in found])
            kept = self.behavior_by_step.setdefault(name, np.zeros((len(self.actions), *values.shape), np.float32))
            kept[t, rows] = values[rows]
        return self.actions[t, rows]
