import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.views import status
from metaloom.pipeline.config.run import RunConfig, build_config

TINY = {
    "env": {"name": "point-corner", "options": {"reward": "dense"}},
    "algorithm": {"name": "promp", "num_epochs": 2, "tasks_per_chunk": 2},
    "policy": {"hidden_sizes": [8, 8]},
    "iterations": 3,
    "num_tasks": 4,
    "episodes_per_task": 3,
    "max_episode_steps": 10,
    "seed": 7,
}


@pytest.fixture(scope="session", autouse=True)
def _no_status_lines():
    """Print no status lines, which appear if a command takes more than ten seconds, as on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(status, "EVERY_SECONDS", 600.0)
        yield


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., RunConfig]:
    """Builds a run that takes a fraction of a second; keyword arguments replace its settings."""
    return lambda **changes: build_config({**TINY, **changes})


@pytest.fixture(scope="session")
def copy_tiny_run(tmp_path_factory, tiny_config) -> Callable[[Path], Path]:
    """Puts a copy of such a run, trained once, at a path."""
    trained = tmp_path_factory.mktemp("trained-once") / "run"
    train(tiny_config(), trained, backend=Backend(workers=0))
    return lambda path: Path(shutil.copytree(trained, path))


@pytest.fixture
def digests() -> Callable[[Path], dict[str, str]]:
    """Reads the output digest of every stage that a run has stored."""

    def read(path: Path) -> dict[str, str]:
        run = storage.open_run(path)
        return {f"{ref.iteration}.{ref.stage}.{ref.step}": run.record(ref).digest for ref in run.refs()}

    return read
