"""Small runs, and the tools that disturb them."""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from metaloom import storage
from metaloom.flows.commands.train import resume, train
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.run import build_config

HERE = Path(__file__).parent
SERIAL = Backend(workers=0)
TINY: dict[str, Any] = {
    "env": {"name": "point-corner", "options": {"reward": "dense"}},
    "algorithm": {"name": "promp", "num_epochs": 1, "tasks_per_chunk": 2},
    "policy": {"hidden_sizes": [4]},
    "iterations": 2,
    "num_tasks": 2,
    "episodes_per_task": 2,
    "max_episode_steps": 4,
    "seed": 7,
}


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def load_module() -> Callable[[str], ModuleType]:
    """Imports a module that lies beside the tests."""
    return _load


@pytest.fixture(scope="session")
def write_points() -> ModuleType:
    """The module that counts write operations."""
    return _load("write_points")


@pytest.fixture(scope="session")
def train_tiny() -> Callable[..., Path]:
    """Trains a run of a tenth of a second at a path; keyword arguments replace its settings."""

    def make(path: Path, **changes: Any) -> Path:
        train(build_config({**TINY, **changes}), path, backend=SERIAL)
        return path

    return make


@pytest.fixture(scope="session")
def tiny_json() -> Callable[..., str]:
    """The settings of such a run for another process."""
    return lambda **changes: json.dumps({**TINY, **changes})


@pytest.fixture(scope="session")
def finish(train_tiny) -> Callable[..., Path]:
    """Goes on with a run that was interrupted, be it in the middle of its creation."""

    def go_on(path: Path, **changes: Any) -> Path:
        if (path / "run.json").exists():
            resume(path, backend=SERIAL)
        else:
            train_tiny(path, **changes)
        return path

    return go_on


@pytest.fixture(scope="session")
def on_page() -> Callable[[str], list[int]]:
    """Finds the numbers of docs/reliability.md that a regular expression has as groups, which must be there once."""
    page = (HERE.parents[1] / "docs" / "reliability.md").read_text("utf-8")

    def find(pattern: str) -> list[int]:
        (match,) = re.finditer(pattern.replace("NUMBER", r"([0-9,]+)"), page)
        return [int(number.replace(",", "")) for number in match.groups()]

    return find


@pytest.fixture(scope="session")
def digests() -> Callable[[Path], dict[str, str]]:
    """Reads the digest of every output that a run has stored."""

    def read(path: Path) -> dict[str, str]:
        run = storage.open_run(path)
        return {ref.file_name: run.record(ref).digest for ref in run.refs()}

    return read


@pytest.fixture(scope="session")
def tiny_runs(tmp_path_factory, train_tiny) -> Callable[[int], Path]:
    """An uninterrupted run of so many iterations; not to be changed."""
    made: dict[int, Path] = {}

    def get(iterations: int) -> Path:
        if iterations not in made:
            made[iterations] = train_tiny(tmp_path_factory.mktemp("whole") / "run", iterations=iterations)
        return made[iterations]

    return get


class Killer:
    """Trains or resumes in processes that die by SIGKILL before a given write operation."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def train(self, path: Path, point: int, *, torn: bool = False, **changes: Any) -> int:
        """Train a new run; returns the exit code, -9 for one that was killed."""
        return self.operate("train", path, point, torn=torn, config={**TINY, **changes})

    def operate(self, operation: str, path: Path, point: int, *, torn: bool = False, **details: Any) -> int:
        """Resume, repair, pack or thin a run; returns the exit code."""
        return self._ask({"operation": operation, "path": str(path), "point": point, "torn": torn, **details})

    def _ask(self, job: dict[str, Any]) -> int:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@pytest.fixture(scope="session")
def killer() -> Iterator[Killer]:
    command = [sys.executable, str(HERE / "write_points.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Killer(process)
        assert process.stdin
        process.stdin.close()
