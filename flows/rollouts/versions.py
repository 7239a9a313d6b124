"""What a process computes with: what has to be equal on trainer and workers, and what only should be.

Workers import this module: no torch.
"""

import socket
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version

from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts.workers import SamplerSpec, code_digest
from metaloom.pipeline.arithmetic import blas_facts
from metaloom.pipeline.envs.registry import make_env

_PACKAGES = ("numpy", "mujoco", "gymnasium")


@cache
def fingerprint() -> dict[str, str]:
    """Versions of everything that decides a rollout's numbers, in this process."""
    return {"metaloom's code": code_digest()[:12]} | {name: version(name) for name in _PACKAGES}


def check_worker(spec: SamplerSpec) -> tuple[dict[str, str], tuple[str, ...]]:
    """Report versions and machine code of a worker, after it has built the environment once. Runs on the worker."""
    make_env(spec.env)
    return fingerprint(), blas_facts()


def require_versions(required: Mapping[str, str], found: Mapping[str, str] | None = None, worker: str = "") -> None:
    """Refuse versions that are not the trainer's, of a worker or of this process.

    Raises:
        WorkersError: they differ, and so would digests.
    """
    there = fingerprint() if required and found is None else found or {}
    differing = [
        f"{name} {there.get(name)} there, {here} here" for name, here in required.items() if there.get(name) != here
    ]
    if differing:
        raise WorkersError(
            f"the Dask worker {f'at {worker}' if worker else f'on {socket.gethostname()}'} computes with something "
            f"else: {'; '.join(differing)}; required the same versions as the trainer's, or digests would differ"
        )
