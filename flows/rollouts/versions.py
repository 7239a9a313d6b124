"""Versions in a process. Some must be equal on trainer and workers; others only should be.

Workers import this module: no torch.
"""

import socket
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

from metaloom.flows.errors import WorkersError
from metaloom.flows.rollouts.workers import SamplerSpec, code_digest
from metaloom.pipeline.arithmetic import acting_facts
from metaloom.pipeline.envs.registry import make_env
from metaloom.pipeline.plugin_files import acting_paths, digest_of, files_of, sources_of

_PACKAGES = ("numpy", "mujoco", "gymnasium")


def fingerprint(spec: SamplerSpec) -> dict[str, str]:
    """Return the versions of everything that affects a rollout in this process, including user-supplied sources."""
    return {**_versions(), **_torch_version(), **_named(sources_of(acting_paths(spec.env, spec.policy)))}


def check_worker(spec: SamplerSpec) -> tuple[dict[str, str], tuple[str, ...]]:
    """Report versions and machine code of a worker, after it has built the environment once. Runs on the worker."""
    make_env(spec.env).close()
    return _fingerprint_here(spec), acting_facts()


def require_own_versions(required: Mapping[str, str], spec: SamplerSpec) -> None:
    """Refuse versions that are not the trainer's, of this process, which is a worker.

    One that the trainer has started imports what is there by then, and may be started again much later.

    Raises:
        WorkersError: they differ, and so would digests.
    """
    require_versions(required, _fingerprint_here(spec), f"on {socket.gethostname()}")


def require_versions(required: Mapping[str, str], found: Mapping[str, str], worker: str) -> None:
    """Refuse versions of a worker that are not the trainer's.

    A worker may do without torch, and may have a plug-in without its source.
    """
    differing = [
        f"{name} {found.get(name)} there, {here} here"
        for name, here in required.items()
        if found.get(name, None if name in _versions() else here) != here
    ]
    if differing:
        raise WorkersError(
            f"the Dask worker {worker} computes with something else: {'; '.join(differing)}; required the same as "
            "the trainer's, or digests would differ. A worker that has it by now has to be started again"
        )


@cache
def _versions() -> dict[str, str]:
    return {"metaloom's code": code_digest()[:12]} | {name: version(name) for name in _PACKAGES}


def _torch_version() -> dict[str, str]:
    # Of a process that computes with it: the plain MLP acts without.
    return {"torch": version("torch")} if "torch" in sys.modules else {}


def _fingerprint_here(spec: SamplerSpec) -> dict[str, str]:
    return {**_versions(), **_torch_version(), **_sources_first_seen(acting_paths(spec.env, spec.policy))}


def _sources_first_seen(paths: Iterable[str]) -> dict[str, str]:
    return _named({name: digest for path in paths for name, digest in _first_seen(path).items()})


@cache
def _first_seen(path: str) -> dict[str, str]:
    """Return the sources of a plug-in when this process first saw it: it computes with these in any case."""
    return {name: _digest_first_seen(file) for name, file in files_of([path]).items()}


@cache
def _digest_first_seen(file: Path) -> str:
    # A module beside this plug-in may have been imported for another one, and have changed since.
    return digest_of(file)


def _named(sources: Mapping[str, str]) -> dict[str, str]:
    return {f"the source of {name}": digest[:12] for name, digest in sources.items()}
