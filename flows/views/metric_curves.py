"""Which metrics of a run belong into one chart, and what they mean."""

from collections.abc import Iterator, Mapping

import numpy as np

from metaloom.flows.formatting import TRIAL_RETURNS, adaptation_label
from metaloom.flows.views.history import History
from metaloom.flows.views.series import AFTER, BEFORE, Lines, Series, shown_steps, steps_note


def success_lines(history: History) -> Iterator[Lines]:
    """Share of successful episodes, where the environment tells of success."""
    yield from _lines(
        history,
        "success_rate",
        "Success rate",
        "share of episodes",
        _of_steps(history, "success_rate"),
        f"Episodes in any step of which the environment told of success{steps_note(history.last_step)}.",
    )


def trial_lines(history: History) -> Iterator[Lines]:
    """Returns of the first and the last episodes of trials, where trials have several."""
    first, last = (history.metrics.get(name) for name in TRIAL_RETURNS)
    if first is None or last is None or np.array_equal(first, last, equal_nan=True):
        return
    yield from _lines(
        history,
        "trial_returns",
        "First and last episode of a trial",
        "average episode return",
        dict(zip(TRIAL_RETURNS, (("first episode", BEFORE), ("last episode", AFTER)), strict=True)),
        "Over all trials of an iteration; the gap is what the policy gains by remembering earlier episodes.",
    )


def optimization_lines(history: History) -> Iterator[Lines]:
    """How the updates went, as far as the algorithm has such metrics."""
    yield from _lines(
        history,
        "kl_divergence",
        "KL divergence of the update",
        "KL divergence (nats)",
        {"inner_kl": ("before adaptation (inner)", BEFORE), "outer_kl": ("after adaptation (outer)", AFTER)},
        "How far an iteration's update moved the policy from the one that collected its episodes.",
    )
    yield from _lines(
        history,
        "entropy",
        "Policy entropy",
        "entropy (nats)",
        _of_steps(history, "entropy"),
        f"Falls as the policy grows certain of its actions{steps_note(history.last_step)}.",
    )
    gained = "; the gap is what the update gained on them" if "loss_before" in history.metrics else ""
    yield from _lines(
        history,
        "loss",
        "Loss of the update",
        "surrogate loss",
        {"loss_before": ("before the update", BEFORE), "loss_after": ("after the update", AFTER)},
        f"On the iteration's episodes{gained}.",
    )
    norm = {"meta_gradient_norm": ("meta-gradient", AFTER)}
    if "meta_gradient_standard_error" in history.metrics:
        yield from _lines(
            history,
            "meta_gradient",
            "Signal and noise of the meta-gradient",
            "norm",
            {**norm, "meta_gradient_standard_error": ("its standard error over tasks", BEFORE)},
            "Where the norm is no larger than its standard error, other tasks would have led elsewhere.",
        )
    else:
        yield from _lines(
            history,
            "meta_gradient",
            "Norm of the meta-gradient",
            "norm",
            norm,
            "How much of it is noise a run records with algorithm.gradient_noise=true.",
        )
    yield from _lines(
        history,
        "gradient_norm",
        "Norm of the gradient",
        "norm",
        {"gradient_norm": ("of the loss", AFTER), "q_gradient_norm": ("of the value function's loss", BEFORE)},
        "Of the updates of an iteration, before any clipping.",
    )
    yield from _lines(
        history,
        "meta_gradient_agreement",
        "Agreement of two halves of the tasks",
        "cosine of their meta-gradients",
        {"meta_gradient_split_cosine": ("cosine", AFTER)},
        "1: both halves lead the same way; around 0: the direction of the update is that of noise.",
    )
    yield from _lines(
        history,
        "explained_variance",
        "Explained variance of the baseline",
        "share of variance",
        _of_steps(history, "explained_variance"),
        f"1: the baseline predicts the returns exactly; 0: no better than their mean{steps_note(history.last_step)}.",
    )


def _of_steps(history: History, metric: str) -> dict[str, tuple[str, str]]:
    last = history.last_step
    return {f"step_{k}.{metric}": (adaptation_label(k, last), color) for k, color in shown_steps(last).items()}


def _lines(
    history: History, name: str, title: str, y_label: str, lines: Mapping[str, tuple[str, str]], note: str
) -> Iterator[Lines]:
    """Lines of metrics, name -> (label, colour), if the run has any of them."""
    series = tuple(
        Series(label, color, history.metrics[metric])
        for metric, (label, color) in lines.items()
        if metric in history.metrics
    )
    if series:
        yield Lines(name, title, y_label, note, "", series)
