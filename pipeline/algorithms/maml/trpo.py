"""MAML-TRPO and E-MAML: MAML with a meta-update within a trust region.

Finn et al. 2017, arXiv:1703.03400, section 5.3; Stadie et al. 2018, arXiv:1803.01118; TRPO, Schulman et al. 2015,
arXiv:1502.05477.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from metaloom.pipeline.algorithms.contract import Kernel, KernelChoice, Setup
from metaloom.pipeline.algorithms.finite_checks import NumericalError
from metaloom.pipeline.algorithms.kernel_choice import choose_kernel, fused, network_blockers
from metaloom.pipeline.algorithms.maml.curvature import (
    MetaPoint,
    difference_product,
    gauss_newton_product,
    hessian_product,
    share_of_rows,
)
from metaloom.pipeline.algorithms.maml.learner import (
    IterationSamples,
    MetaLearner,
    MetaUpdate,
    mean_over_tasks,
)
from metaloom.pipeline.algorithms.maml.losses import INNER_LOSSES, LOSS, OUTER_KL, likelihood_ratio_loss, policy_kls
from metaloom.pipeline.algorithms.maml.meta_gradient import (
    MetaProblem,
    Objective,
    TaskValues,
    measured_meta_gradient,
    meta_objective,
)
from metaloom.pipeline.algorithms.maml.policy_gradient import with_exploration
from metaloom.pipeline.algorithms.maml.rows import Chunk
from metaloom.pipeline.algorithms.maml.settings import EMAML, MAMLTRPO, TrustRegion
from metaloom.pipeline.nn.distributions import Distribution
from metaloom.pipeline.nn.flat_networks import FlatParams
from metaloom.pipeline.nn.optimizers import natural_step, search
from metaloom.pipeline.policies.contract import Policy
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.types import Array, LearnerState, Params, Step


class TrustRegionLearner(MetaLearner):
    """The likelihood-ratio loss after adaptation, whatever the inner loss, and credit for exploration when it is on."""

    def __init__(self, settings: MAMLTRPO | EMAML, setup: Setup) -> None:
        super().__init__(settings, setup, INNER_LOSSES[settings.inner_loss], TrustRegionStep(settings))
        self._settings = settings

    def objective(self, state: LearnerState, steps: Sequence[Step]) -> Objective:
        """The surrogate and the KLs, the outer one in the order of kl_order; see MetaLearner."""

        def objective(current: Sequence[Distribution], chunk: Chunk) -> dict[str, Tensor]:
            values = {LOSS: likelihood_ratio_loss(current[-1], chunk.rounds[-1]), **policy_kls(current, chunk)}
            if self._settings.kl_order == "new_old":
                values[OUTER_KL] = bounded_kl(current, chunk, new_old=True)[LOSS].detach()
            return values

        return with_exploration(objective, self._settings, steps)


def bounded_kl(current: Sequence[Distribution], chunk: Chunk, *, new_old: bool = False) -> dict[str, Tensor]:
    """The KL that is bounded, as `loss`, with its gradient: KL(acted ‖ updated), or in the other order."""
    adapted, rows = current[-1], chunk.rounds[-1]
    return {LOSS: rows.mean(adapted.kl(rows.behavior) if new_old else rows.behavior.kl(adapted))}


class TrustRegionStep:
    """One step along the natural gradient, the longest that keeps the KL within its bound, or none; see MetaStep."""

    def __init__(self, settings: TrustRegion) -> None:
        self._settings = settings
        self._gauss_newton_product = gauss_newton_product

    def choose_kernel(self, asked: KernelChoice, policy: Policy, setup: Setup) -> Kernel:
        """Fused products with the Gauss-Newton matrix where they are known; see MetaStep."""
        if setup.device == "mps" and self._settings.hvp == "finite_difference":
            raise ConfigError(
                "algorithm.hvp is finite_difference, which computes in float64, but device is mps, which has none; use "
                "algorithm.hvp=gauss_newton"
            )
        network = policy.network.spec
        blockers = [*network_blockers(network, device=setup.device)]
        if setup.policy.name is not None:
            blockers.append(f"policy is {setup.policy.name}")
        if self._settings.hvp != "gauss_newton":
            blockers.append(f"hvp is {self._settings.hvp}")
        kernel = choose_kernel(asked, blockers=blockers, fused=f"plain {network.activation} network on the CPU")
        if kernel.name == "fused":
            self._gauss_newton_product = fused(gauss_newton_product)
        return kernel

    def initialize(self, learned: Mapping[str, Array]) -> Params:
        """There is no state; see MetaStep."""
        return {}

    def __call__(
        self, problem: MetaProblem, meta_params: Params, state: LearnerState, samples: IterationSamples
    ) -> MetaUpdate:
        """Solve G x = g, scale x to a KL of max_kl by the quadratic model, and search along it; see MetaStep."""
        chunks, parallel = samples.chunks(), samples.parallel
        gradients, before, measured = measured_meta_gradient(
            problem, meta_params, chunks, noise=samples.noise, parallel=parallel
        )
        flat = FlatParams({name: meta_params[name] for name in problem.policy.learned(meta_params)})
        at = MetaPoint(problem, meta_params, flat, self._product_chunks(samples, chunks), parallel)
        constraint, hvp = partial(bounded_kl, new_old=self._settings.kl_order == "new_old"), self._settings.hvp
        if hvp == "gauss_newton":
            product = self._gauss_newton_product(at)
        elif hvp == "hessian":
            product = hessian_product(at, constraint)
        else:
            product = difference_product(at, constraint, scaled=hvp == "finite_difference")
        full_step, metrics = natural_step(product, flat.pack(gradients), self._settings)

        def evaluate(params: Params) -> TaskValues | None:
            try:
                return meta_objective(problem, params, chunks=chunks, parallel=parallel)
            except NumericalError:
                return None

        def accept(after: TaskValues) -> bool:
            falls = mean_over_tasks(after[LOSS]) < mean_over_tasks(before[LOSS])
            return falls and mean_over_tasks(after[OUTER_KL]) <= self._settings.max_kl

        found, searched = search(meta_params, flat.views(full_step), evaluate, accept, self._settings)
        # What a rejected step leaves are the very same arrays.
        updated, after = (meta_params, before) if found is None or found.value is None else (found.params, found.value)
        metrics |= {"outer_kl_before": mean_over_tasks(before[OUTER_KL]), **measured, **searched}
        return MetaUpdate(updated, state.optimizer, before, after, metrics)

    def _product_chunks(self, samples: IterationSamples, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        share, rows = self._settings.hvp_subsample, None
        if share == 1 and self._settings.hvp != "finite_difference":
            return chunks
        if share < 1:
            rng = samples.generator(0)
            masks = [step.samples.mask.reshape(len(step.samples.mask), -1) for step in samples.steps]
            rows = [share_of_rows(mask, share, rng) for mask in masks]
        dtype = torch.float64 if self._settings.hvp == "finite_difference" else torch.float32
        return samples.chunks(rows, dtype=dtype)
