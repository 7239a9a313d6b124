"""Containers of docs/lab's image, made by Docker or podman where one of them runs."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASE = "python:3.11-slim-bookworm"


@dataclass(frozen=True)
class Engine:
    """The program that makes containers, and the image that it has built."""

    program: str
    image: str = "metaloom-test"

    def __call__(self, *arguments: str | Path, seconds: float = 600) -> str:
        # An older Docker knows what to leave out by its newer builder only.
        environment = os.environ | {"DOCKER_BUILDKIT": "1"}
        done = subprocess.run(
            [self.program, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def has(self, *arguments: str) -> bool:
        return subprocess.run([self.program, *arguments], capture_output=True).returncode == 0


def engine() -> Engine:
    """Find a program that can build from docs/lab/Dockerfile; skips the test where there is none."""
    found = [Engine(name) for name in ("docker", "podman") if shutil.which(name)]
    running = [engine for engine in found if engine.has("info")]
    if not running:
        pytest.skip("neither Docker nor podman runs here")
    ready = [engine for engine in running if engine.has("image", "inspect", BASE)]
    if not ready:
        pytest.skip(f"the base image is not here: {running[0].program} pull {BASE}")
    return ready[0]


@contextmanager
def built_image() -> Iterator[Engine]:
    """Build docs/lab/Dockerfile as it is; the image lasts as long as the context."""
    made = engine()
    made("build", "-f", "docs/lab/Dockerfile", "-t", made.image, ".", seconds=1800)
    try:
        yield made
    finally:
        made("rmi", made.image)
