"""Run one stage of a stored iteration again under another setting, and compare what comes out.

    python examples/change_one_stage.py [RUN_FOLDER]

The batches that the stage reads come from the store, so nothing is sampled again and only the setting differs. Without
a folder a small run is trained first.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from metaloom import storage
from metaloom.flows.commands.train import stages_of, train
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import RunConfig, build_config
from metaloom.storage import StageRef

IN_THIS_PROCESS = Backend(workers=0)
ITERATION = 2


def small_run(folder: Path) -> storage.Run:
    """Three iterations of ProMP on the corner point robot."""
    settings = override(
        load_settings("promp-point-corner"),
        ["iterations=3", "num_tasks=8", "episodes_per_task=8", "max_episode_steps=40", "env.options.reward=dense"],
    )
    train(build_config(settings), folder, backend=IN_THIS_PROCESS)
    return storage.open_run(folder)


def compute(config: RunConfig, ref: StageRef, run: storage.Run) -> Any:
    """A stage's output under a configuration, from inputs that a run has stored."""
    with stages_of(config, IN_THIS_PROCESS) as stages:
        return stages.compute(ref, run)


def change_processing(run: storage.Run, config: RunConfig) -> None:
    """Ask how much the advantages depend on GAE's lambda."""
    ref = StageRef(ITERATION, "process_samples", 1)
    stored = run.load(ref)
    same = compute(config, ref, run)
    print("unchanged settings give the stored digest:", storage.digest(same) == storage.digest(stored))
    for gae_lambda in (0.5, 0.9):
        changed = build_config(override(config.model_dump(), [f"processing.gae_lambda={gae_lambda}"]))
        advantages = compute(changed, ref, run).advantages
        correlation = np.corrcoef(advantages.ravel(), stored.advantages.ravel())[0, 1]
        print(f"gae_lambda={gae_lambda}: correlation with the stored advantages {correlation:.3f}")


def change_optimization(run: storage.Run, config: RunConfig) -> None:
    """Ask what the meta-update would have been with a narrower clipping range or more epochs."""
    ref = StageRef(ITERATION, "meta_optimize")
    before = run[ITERATION].learner().params
    for setting in ("algorithm.clip_eps=0.3", "algorithm.clip_eps=0.05", "algorithm.num_epochs=20"):
        changed = build_config(override(config.model_dump(), [setting]))
        update = compute(changed, ref, run)
        moved = np.sqrt(sum(float(np.sum((update.learner.params[name] - before[name]) ** 2)) for name in before))
        metrics = update.metrics
        print(f"{setting:26} loss {metrics['loss_before']:+.4f} -> {metrics['loss_after']:+.4f}  step {moved:.4f}")


def main() -> None:
    """Change two stages of a stored iteration."""
    with tempfile.TemporaryDirectory() as scratch:
        run = storage.open_run(Path(sys.argv[1])) if len(sys.argv) > 1 else small_run(Path(scratch) / "small-run")
        config = build_config(run.config)
        for change in (change_processing, change_optimization):
            print(f"\n{change.__doc__}")
            change(run, config)


if __name__ == "__main__":
    main()
