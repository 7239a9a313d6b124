"""Gradient steps of VariBAD's model: the encoder that infers tasks and the decoders that it learns by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from metaloom.pipeline.algorithms.contract import Setup
from metaloom.pipeline.algorithms.finite_checks import require_finite_params
from metaloom.pipeline.algorithms.varibad.decoders import DecodedSteps, Decoders
from metaloom.pipeline.algorithms.varibad.elbo import Drawn, TrialTensors, elbo
from metaloom.pipeline.algorithms.varibad.settings import VariBAD
from metaloom.pipeline.estimation.trials import Trials
from metaloom.pipeline.nn.descent import Descent
from metaloom.pipeline.nn.flat_tensors import FlatTensors
from metaloom.pipeline.policies.inferring import Encoder
from metaloom.pipeline.replay.trials import TrialBuffer
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, Metrics, Params

ADAM_EPSILON = 1e-8


class Model:
    """An encoder with its decoders, as functions of explicit parameters."""

    def __init__(self, settings: VariBAD, setup: Setup, encoder: Encoder, device: torch.device) -> None:
        self._settings, self._encoder, self._device = settings, encoder, device
        self._decoders = Decoders(settings, setup)

    def initialize_decoders(self, rng: np.random.Generator) -> Params:
        """Draw the decoders' parameters."""
        return self._decoders.initialize(rng)

    def learn(
        self,
        params: Params,
        optimizer: Params,
        buffer: TrialBuffer,
        *,
        learning_rate: float,
        run_seed: int,
        iteration: int,
    ) -> tuple[Params, Params, Metrics]:
        """Return parameters and the optimizer's state after an iteration's gradient steps, and what describes them.

        Raises:
            NumericalError: naming what is not finite.
        """
        settings = self._settings
        flat = FlatTensors(params, self._device)
        descent = Descent(settings.model_optimizer, flat, optimizer, epsilon=ADAM_EPSILON)
        size = min(settings.trials_per_model_update, len(buffer))
        parts: list[Tensor] = []
        for n in range(settings.model_updates):
            rng = generator(run_seed, "model", iteration, n)
            trials = self._tensors(buffer.take(rng.choice(len(buffer), size, replace=False)))
            found = elbo(self._encoder, self._decoders, flat.params, trials, self._drawn(trials, rng))
            explained = settings.reward_weight * found.rewards
            if settings.decode_states:
                explained = explained + settings.state_weight * found.states
            descent.down(settings.kl_weight * found.kl - explained, learning_rate)
            parts.append(torch.stack(found).detach())
        after = flat.copies()
        require_finite_params({"the model": after}, stage="meta_optimize", advice="Lower algorithm.model_learning_rate")
        # Read only now, so that a device is not waited for before its work.
        rewards, states, kl = torch.stack(parts).mean(0).tolist()
        metrics = {"reward_log_likelihood": rewards, "posterior_kl": kl, "elbo": rewards + states - kl}
        return after, descent.state, metrics | ({"state_log_likelihood": states} if settings.decode_states else {})

    def _drawn(self, trials: TrialTensors, rng: np.random.Generator) -> Drawn:
        settings, lengths = self._settings, trials.lengths.cpu().numpy()
        L, N, _ = trials.inputs.shape
        K = settings.elbo_steps or L
        # Noise first, and whole numbers by their place in a trial of any length.
        noise = rng.standard_normal((K, N, settings.latent_size), np.float32)
        at = None if settings.elbo_steps is None else (rng.random((K, N)) * lengths).astype(np.int64)
        D = settings.decoded_steps
        decoded = None if D is None else (rng.random((N, D)) * lengths[:, None]).astype(np.int64)
        at, decoded = (None if steps is None else self._tensor(steps) for steps in (at, decoded))
        return Drawn(at, decoded, self._tensor(noise))

    def _tensors(self, chosen: Sequence[tuple[Trials, int]]) -> TrialTensors:
        lengths = np.array([int(trials.mask[n].sum()) for trials, n in chosen])
        L = int(lengths.max())

        def together(name: str) -> Tensor:
            """[N, L, ...], zero behind the trials of rounds whose longest is shorter."""
            parts = [getattr(trials, name)[n, :L] for trials, n in chosen]
            stacked = np.zeros((len(parts), L, *parts[0].shape[1:]), np.float32)
            for row, part in zip(stacked, parts, strict=True):
                row[: len(part)] = part
            return self._tensor(stacked)

        inputs, O = together("inputs"), chosen[0][0].next_observations.shape[-1]
        steps = DecodedSteps(inputs[..., :O], together("taken"), together("next_observations"), together("rewards"))
        return TrialTensors(inputs.transpose(0, 1).contiguous(), steps, self._tensor(lengths))

    def _tensor(self, values: Array) -> Tensor:
        return torch.from_numpy(values).to(self._device)
