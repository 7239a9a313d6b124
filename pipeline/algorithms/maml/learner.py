"""Base class for learners that adapt by gradient steps."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Kernel, Learner, Setup, Steps
from metaloom.pipeline.algorithms.maml.meta_gradient import (
    INNER_KL,
    LOG_INNER_LR,
    LOSS,
    OUTER_KL,
    InnerLoss,
    MetaProblem,
    Objective,
    TaskValues,
    inner_step,
    join,
    meta_gradient,
    meta_objective,
)
from metaloom.pipeline.algorithms.maml.rows import (
    Chunk,
    build_chunks,
    chunk_bounds,
    minibatches,
    require_finite,
    task_rows,
    to_tensor,
)
from metaloom.pipeline.algorithms.maml.settings import MetaAdam, MetaSettings
from metaloom.pipeline.estimation.processing import process_samples
from metaloom.pipeline.nn.device import use_device
from metaloom.pipeline.nn.optimizers import Adam
from metaloom.pipeline.nn.torch_optimizers import TorchOptimizerSteps, lr_factor
from metaloom.pipeline.policies.build import build_policy
from metaloom.pipeline.policies.contract import Policy
from metaloom.pipeline.schema import ConfigError
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import (
    Array,
    EpisodeBatch,
    LearnerState,
    Metrics,
    ParallelMap,
    Params,
    Samples,
    Step,
    TaskParams,
)

LARGEST_NORM = "largest_gradient_norm"  # metric: before rescaling, over the optimizer steps of an iteration

Draws = Callable[[int], np.random.Generator]  # function that returns the random generator for an epoch


class MetaUpdate(NamedTuple):
    """Meta-parameters and optimizer state after a meta-update, task values before and after it, and metrics."""

    meta_params: Params
    optimizer: Params
    before: TaskValues
    after: TaskValues
    metrics: Metrics


class MetaLearner(Learner[Step, Steps]):
    """Learner that adapts by gradient steps on each task's samples, and differentiates the meta-loss through them."""

    def __init__(self, settings: MetaSettings, setup: Setup, inner_loss: InnerLoss) -> None:
        self.policy: Policy = build_policy(setup.policy, setup)
        self.settings: MetaSettings = settings
        self._setup, self._inner_loss = setup, inner_loss
        self._device = use_device(setup.device)
        if isinstance(settings, MetaAdam):
            self._lr_factor = lr_factor(settings, settings.outer_lr)
        reason = "requested" if settings.kernel == "torch" else "the whole update is differentiated by torch"
        self.kernel: Kernel = Kernel("torch", reason)

    @abstractmethod
    def objective(self, state: LearnerState, steps: Steps) -> Objective:
        """Return the meta-loss as a function of the policies before and after each inner step."""

    def initialize(self, *, run_seed: int) -> LearnerState:
        params = self.policy.initialize(generator(run_seed, "initialize"))
        learned = {name: params[name] for name in self.policy.learned(params)}
        extra: Params = {NUM_UPDATES: np.zeros((), np.int64)}
        if self.settings.trainable_inner_lr:
            for name, value in learned.items():
                shape = (self.settings.inner_steps, *value.shape)
                extra[LOG_INNER_LR + name] = np.full(shape, np.log(self.settings.inner_lr), np.float32)
        by_steps = self.settings if isinstance(self.settings, MetaAdam) else None
        optimizer = {} if by_steps is None else _optimizer(by_steps).initialize(learned | step_size_logs(extra))
        return LearnerState(params, optimizer, extra)

    def process(
        self, state: LearnerState, episodes: EpisodeBatch, *, seed: int, parallel: ParallelMap = map
    ) -> Samples:
        baseline = self._setup.baseline.build()
        return process_samples(episodes, baseline, self._setup.processing, seed=seed, parallel=parallel)

    def adapt(
        self, state: LearnerState, params: TaskParams, evidence: Step, *, parallel: ParallelMap = map
    ) -> TaskParams:
        """Return each task's parameters after inner step `evidence.k` on its samples.

        Inner steps beyond those used in training reuse the last step size.
        """
        if not self.settings.inner_steps:
            raise ConfigError("algorithm.inner_steps is 0, so no task adapts; it must be at least 1")
        k = min(evidence.k, self.settings.inner_steps - 1)
        logs = {name.removeprefix(LOG_INNER_LR): log[k] for name, log in step_size_logs(state.extra).items()}
        alphas = {name: to_tensor(np.exp(log), torch.float32, self._device) for name, log in logs.items()}

        def work(tasks: slice) -> Params:
            rows = task_rows(evidence, tasks, device=self._device, recorded=self.policy.recorded)
            leaves = {
                name: to_tensor(value, torch.float32, self._device).requires_grad_()
                for name, value in params.slice(tasks.start, tasks.stop).params.items()
            }
            losses = self._inner_loss(self.policy.distribution(leaves, rows.observations), rows)
            alpha = alphas or self.settings.inner_lr
            adapted = inner_step(self.policy, leaves, losses, alpha, differentiable=False)
            require_finite(adapted, tasks.start, "Lower inner_lr.", of="adapted ")
            return {name: value.detach().cpu().numpy() for name, value in adapted.items()}

        bounds = chunk_bounds(len(evidence.episodes.lengths), self.settings.tasks_per_chunk)
        return TaskParams(join([*parallel(work, bounds)]))

    def update(
        self, state: LearnerState, experience: Steps, *, run_seed: int, iteration: int, parallel: ParallelMap = map
    ) -> tuple[LearnerState, Metrics]:
        found, required = [step.k for step in experience], list(range(self.settings.inner_steps + 1))
        if found != required:
            raise ValueError(f"meta_optimize: got samples of inner steps {found}; expected {required}, in this order")
        draws = partial(generator, run_seed, "minibatches", iteration)
        made = self.minimize(state, experience, draws=draws, parallel=parallel)
        extra, of_algorithm = self.concluded(state, made.after)
        extra = {**state.extra, **step_size_logs(made.meta_params), **extra}
        extra[NUM_UPDATES] = np.array(state.extra[NUM_UPDATES] + 1)
        after = {name: mean_over_tasks(value) for name, value in made.after.items()}
        inner_kls = [after.pop(name) for name in made.after if name.startswith(INNER_KL)]
        metrics = {"loss_before": mean_over_tasks(made.before[LOSS]), "loss_after": after.pop(LOSS), **after}
        if inner_kls:
            metrics["inner_kl"] = float(np.mean(inner_kls))
        if self.settings.trainable_inner_lr:
            logs = np.concatenate([log.ravel() for log in step_size_logs(extra).values()])
            metrics["inner_lr"] = float(np.exp(logs, dtype=np.float64).mean())
        params = {name: made.meta_params[name] for name in state.params}
        return LearnerState(params, made.optimizer, extra), {**metrics, **made.metrics, **of_algorithm}

    def concluded(self, state: LearnerState, after: TaskValues) -> tuple[Params, Metrics]:
        """Return algorithm-specific arrays for the next state, and metrics. By default, there are none."""
        return {}, {}

    def minimize(self, state: LearnerState, steps: Steps, *, draws: Draws, parallel: ParallelMap = map) -> MetaUpdate:
        """Minimize the meta-loss with optimizer steps, in epochs over the samples."""
        settings, problem = self.settings, self.problem(state, steps)
        assert isinstance(settings, MetaAdam), "other settings override minimize"
        rate = settings.outer_lr
        if settings.lr_schedule != "constant":
            rate *= self._lr_factor(int(state.extra[NUM_UPDATES]))
        optimizer, optimizer_state = _optimizer(settings, rate), state.optimizer
        meta_params = state.params | step_size_logs(state.extra)
        everything = self.chunks(steps, parallel=parallel)
        evaluate = partial(meta_objective, problem, chunks=everything, parallel=parallel)
        before: TaskValues = {}
        after: TaskValues = {}
        metrics: Metrics = {}
        epoch = 0
        for epoch in range(settings.num_epochs):
            parts: Iterable[Sequence[Array] | None] = [None]
            if settings.num_minibatches > 1:
                rng = draws(epoch)
                parts = zip(*(minibatches(step.samples, settings.num_minibatches, rng) for step in steps), strict=True)
            for rows in parts:
                chunks = everything if rows is None else self.chunks(steps, rows=rows, parallel=parallel)
                noise = settings.gradient_noise and not before
                gradients, values, measured = meta_gradient(
                    problem, meta_params, chunks, noise=noise, parallel=parallel
                )
                if not before:
                    before, metrics = values if rows is None else evaluate(meta_params), measured
                norm, limit = measured["meta_gradient_norm"], settings.max_grad_norm
                if limit is not None:
                    metrics[LARGEST_NORM] = max(norm, metrics.get(LARGEST_NORM, 0.0))
                    scale = np.float32(limit / max(norm, limit))
                    gradients = {name: value * scale for name, value in gradients.items()}
                meta_params, optimizer_state = optimizer.step(meta_params, gradients, optimizer_state)
            tolerance, target_kl = settings.tolerance, settings.target_kl
            if tolerance is not None or target_kl is not None:
                last, after = after or before, evaluate(meta_params)
                change = abs(mean_over_tasks(after[LOSS]) - mean_over_tasks(last[LOSS]))
                if tolerance is not None and change < tolerance:
                    break
                if target_kl is not None and not mean_over_tasks(after[OUTER_KL]) <= target_kl:
                    break
        if settings.tolerance is not None:
            metrics["epochs"] = epoch + 1.0
        if settings.lr_schedule != "constant":
            metrics["outer_lr"] = rate
        return MetaUpdate(meta_params, optimizer_state, before, after or evaluate(meta_params), metrics)

    def chunks(
        self,
        steps: Steps,
        *,
        rows: Sequence[Array] | None = None,
        dtype: torch.dtype = torch.float32,
        parallel: ParallelMap = map,
    ) -> Sequence[Chunk]:
        """Split the tasks into chunks, and return their rows as tensors: all, or those at the indices in `rows`."""
        size, recorded = self.settings.tasks_per_chunk, self.policy.recorded
        return build_chunks(steps, size, rows, dtype=dtype, device=self._device, recorded=recorded, parallel=parallel)

    def problem(self, state: LearnerState, steps: Steps) -> MetaProblem:
        """Return the meta-learning problem of this iteration: the adaptation and the meta-loss."""
        inner_lr, first_order = self.settings.inner_lr, self.settings.first_order
        return MetaProblem(self.policy, self._inner_loss, inner_lr, first_order, self.objective(state, steps))


def _optimizer(settings: MetaAdam, rate: float = 0.0) -> Adam | TorchOptimizerSteps:
    return Adam(rate) if settings.optimizer is None else TorchOptimizerSteps(settings.optimizer, rate)


def step_size_logs(arrays: Mapping[str, Array]) -> Params:
    """Return the logarithms of the inner step sizes, keyed by full name; empty if step sizes are not trained."""
    return {name: value for name, value in arrays.items() if name.startswith(LOG_INNER_LR)}


def mean_over_tasks(values: Array) -> float:
    """Return the mean over tasks of values [B], in float64."""
    return float(values.mean(dtype=np.float64))
