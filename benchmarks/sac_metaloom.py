"""Metaloom's SAC with the settings that `benchmarks/sac.py` compares under, trained through the store."""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import sac_reference as reference
import sac_settings as same

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.observer import IterationReport, Observer
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.run import RunConfig, build_config
from metaloom.pipeline.types import EpisodeBatch
from metaloom.storage import StageRef

UPDATE_STAGES = ("sample_transitions", "update")


def config(env: str, steps: int, seed: int, tests: reference.Tests) -> RunConfig:
    """A run that ends after so many environment steps, the random ones included."""
    algorithm = {
        "name": "sac",
        "learning_rate": same.LEARNING_RATE,
        "memory_size": same.MEMORY_SIZE,
        "num_init_memory_steps": same.RANDOM_STEPS,
        "batch_size": same.BATCH_SIZE,
        "tau": same.OLD_TARGET_WEIGHT,
        "ent_coeff_init": same.FIRST_TEMPERATURE,
        "critic_hidden_sizes": same.HIDDEN_SIZES,
        "max_grad_norm": None,
    }
    return build_config(
        {
            "env": {"name": env, "action_scale": 1.0},
            "algorithm": algorithm,
            "policy": {"hidden_sizes": same.HIDDEN_SIZES},
            "processing": {"discount": same.DISCOUNT},
            "episodes_per_task": 1,
            "evaluation": {"every": tests.every, "test_episodes": tests.episodes, "deterministic": True},
            "iterations": steps,
            "stop": {"samples": steps},
            "seed": seed,
        }
    )


class Clock:
    """Times the stages that make an update; a StageCall."""

    def __init__(self, progress: reference.Progress) -> None:
        self._progress = progress

    def __call__(self, ref: StageRef, inputs: Sequence[StageRef], compute: Callable[[], StageRef]) -> StageRef:
        """Compute and store a stage."""
        began, cpu = time.perf_counter(), time.process_time()
        done = compute()
        if ref.stage in UPDATE_STAGES:
            self._progress.update_seconds += time.perf_counter() - began
            self._progress.update_cpu_seconds += time.process_time() - cpu
        return done


def train_metaloom(
    env: str, steps: int, seed: int, tests: reference.Tests, report: Callable[[reference.Progress], None]
) -> reference.Progress:
    """Train for so many environment steps; `report` is told what there is after every test."""
    progress = reference.Progress()

    def iteration_done(done: IterationReport) -> None:
        progress.gradient_steps += int(done.metrics["gradient_steps"])
        if done.evaluation_returns:
            about = {"steps": int(done.metrics["env_steps"]), "gradient_steps": progress.gradient_steps}
            progress.evaluations.append({**about, "returns": list(done.evaluation_returns)})
            report(progress)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        backend, observer = Backend(workers=0), Observer(iteration_done=iteration_done)
        train(config(env, steps, seed, tests), path, backend=backend, call=Clock(progress), observer=observer)
        _add_episodes(progress, storage.open_run(path))
    return progress


def _add_episodes(progress: reference.Progress, run: storage.Run) -> None:
    """Lengths and returns, which are read when all is stored."""
    for ref in run.refs():
        if ref.stage in ("fill_memory", "collect_rollouts"):
            episodes = run.load(ref)
            assert isinstance(episodes, EpisodeBatch)
            progress.lengths += episodes.lengths[episodes.real].tolist()
            progress.returns += episodes.episode_returns[episodes.real].tolist()
