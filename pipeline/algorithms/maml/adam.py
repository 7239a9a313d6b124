"""The meta-update by Adam, or another optimizer, in epochs over the samples of one iteration."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from metaloom.pipeline.algorithms.contract import NUM_UPDATES, Kernel, KernelChoice, Setup
from metaloom.pipeline.algorithms.maml.learner import IterationSamples, MetaUpdate, mean_over_tasks
from metaloom.pipeline.algorithms.maml.losses import LOSS
from metaloom.pipeline.algorithms.maml.meta_gradient import (
    MetaProblem,
    TaskValues,
    measured_meta_gradient,
    meta_gradient,
    meta_objective,
)
from metaloom.pipeline.algorithms.maml.rows import Chunk, minibatches
from metaloom.pipeline.algorithms.maml.settings import MetaAdam
from metaloom.pipeline.nn.optimizers import Adam
from metaloom.pipeline.nn.schedules import lr_factor
from metaloom.pipeline.nn.torch_optimizers import TorchOptimizerSteps
from metaloom.pipeline.policies.contract import Policy
from metaloom.pipeline.types import Array, LearnerState, Metrics, Params


class AdamEpochs:
    """Steps against the meta-gradient; see MetaStep."""

    def __init__(self, settings: MetaAdam) -> None:
        self._settings = settings
        self._lr_factor = lr_factor(settings, settings.outer_lr)

    def choose_kernel(self, asked: KernelChoice, policy: Policy, setup: Setup) -> Kernel:
        """Choose torch; see MetaStep."""
        return Kernel("torch", "asked for" if asked == "torch" else "the whole update is differentiated by torch")

    def initialize(self, learned: Mapping[str, Array]) -> Params:
        return self._optimizer(0).initialize(learned)

    def __call__(
        self, problem: MetaProblem, meta_params: Params, state: LearnerState, samples: IterationSamples
    ) -> MetaUpdate:
        """Run epochs of steps, each on its minibatch of every task's rows; see MetaStep."""
        settings, parallel = self._settings, samples.parallel
        optimizer, optimizer_state = self._optimizer(int(state.extra[NUM_UPDATES])), state.optimizer
        everything = samples.chunks()
        evaluate = partial(meta_objective, problem, chunks=everything, parallel=parallel)
        before: TaskValues = {}
        after: TaskValues = {}
        metrics: Metrics = {}
        epoch = 0
        for epoch in range(settings.num_epochs):
            for chunks in self._minibatches(samples, everything, epoch):
                if before:
                    gradients, _ = meta_gradient(problem, meta_params, chunks, parallel=parallel)
                else:
                    gradients, values, metrics = measured_meta_gradient(
                        problem, meta_params, chunks, noise=samples.noise, parallel=parallel
                    )
                    before = values if chunks is everything else evaluate(meta_params)
                meta_params, optimizer_state = optimizer.step(meta_params, gradients, optimizer_state)
            if settings.tolerance is not None:
                last, after = after or before, evaluate(meta_params)
                if abs(mean_over_tasks(after[LOSS]) - mean_over_tasks(last[LOSS])) < settings.tolerance:
                    break
        if settings.tolerance is not None:
            metrics["epochs"] = epoch + 1.0
        if settings.lr_schedule != "constant":
            metrics["outer_lr"] = optimizer.learning_rate
        return MetaUpdate(meta_params, optimizer_state, before, after or evaluate(meta_params), metrics)

    def _optimizer(self, num_updates: int) -> Adam | TorchOptimizerSteps:
        rate = self._settings.outer_lr * self._lr_factor(num_updates)
        config = self._settings.optimizer
        return Adam(rate) if config is None else TorchOptimizerSteps(config, rate)

    def _minibatches(
        self, samples: IterationSamples, everything: Sequence[Chunk], epoch: int
    ) -> Iterator[Sequence[Chunk]]:
        if self._settings.num_minibatches == 1:
            yield everything
            return
        rng = samples.generator(epoch)
        rounds = [minibatches(step.samples, self._settings.num_minibatches, rng) for step in samples.steps]
        for rows in zip(*rounds, strict=True):
            yield samples.chunks(rows)
