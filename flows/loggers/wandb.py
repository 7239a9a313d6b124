"""Logger for Weights & Biases, offline unless WANDB_MODE is set. Requires the extra `wandb`."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from metaloom.flows.loggers.numbers import distributions, scalars, timings
from metaloom.flows.observer import IterationReport
from metaloom.storage import Run


class _WandbRun:
    """Logger that writes to a Weights & Biases run, with its local files in `folder`."""

    def __init__(self, run: Run, folder: Path) -> None:
        # Set before importing wandb, which would otherwise report errors to the vendor.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb: Any = wandb
        folder.mkdir(exist_ok=True)
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "metaloom",
            name=run.path.name,
            # Use the run's own id, so that resumed training continues the same W&B run.
            id=run.info["id"].replace("-", ""),
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(folder),
            config=dict(run.config),
            allow_val_change=True,  # the iterations and retention may change when training resumes
            # Send only what is logged, not the console output, the code or the machine's load.
            settings=wandb.Settings(
                mode=os.environ.get("WANDB_MODE") or "offline",  # pyright: ignore[reportArgumentType]
                console="off",
                silent=True,
                **dict.fromkeys(("disable_git", "disable_code", "x_disable_stats", "x_disable_meta"), True),
            ),
        )

    def iteration(self, report: IterationReport, ended: float) -> None:
        histograms = {
            name: self._wandb.Histogram(np_histogram=np.histogram(returns, bins="auto"))
            for name, returns in distributions(report).items()
        }
        self._step = report.iteration
        self._run.log({**scalars(report), **timings(report), **histograms}, step=report.iteration)

    def film(self, file: Path, report: IterationReport) -> None:
        # W&B rejects data for a step before the last one.
        step = max(self._step, report.iteration)
        film = self._wandb.Video(str(file), format="gif")
        self._run.log({"film": film, "film_iteration": report.iteration}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


open_logger = _WandbRun
