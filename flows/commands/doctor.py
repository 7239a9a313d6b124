"""Checks of this machine (packages, cores, memory, disk, physics, Prefect) or of an environment, with remedies."""

import errno
import fcntl
import os
import shutil
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, redirect_stderr
from importlib import import_module, metadata
from io import StringIO
from pathlib import Path
from typing import Literal

import numpy as np
from packaging.requirements import Requirement
from pydantic import ValidationError

from metaloom.flows.errors import UsageError
from metaloom.flows.formatting import size
from metaloom.flows.results.checks import Check
from metaloom.flows.rollouts.rehearsal import settled
from metaloom.pipeline.config.input import override
from metaloom.pipeline.envs.config import EnvConfig, gymnasium_limit
from metaloom.pipeline.envs.contract import BatchEnv, EnvError
from metaloom.pipeline.envs.registry import make_batch_env
from metaloom.pipeline.envs.rehearsal import ROWS, Rehearsal

DISTRIBUTION = "metaloom"
REINSTALL = "make setup"
REBUILD = f"rm -r .venv; {REINSTALL}"
ANOTHER_FOLDER = "choose a folder on a local disk with room: export METALOOM_RUNS=/path/to/runs"

# One half-cheetah iteration at the paper's sizes is 28 MB and takes about five seconds.
SLOW_FSYNC_BYTES_PER_SECOND = 20e6
FULL_DISK_BYTES, LOW_DISK_BYTES = 0.5e9, 10e9
LOW_MEMORY_BYTES = 2e9
PROBE_BYTES = 16_000_000
PREFECT_TIMEOUT_SECONDS = 3
_SETTINGS = "prefect.toml, pyproject.toml or .env in this folder, ~/.prefect/profiles.toml or PREFECT_ variables"


def check_all(runs_root: Path) -> list[Check]:
    """Run all checks of this machine and return their results in the order of the table."""
    checks = [check_python(), *check_packages()]
    probes: list[tuple[str, Callable[[], Check], str]] = [
        ("cores", check_cores, REBUILD),
        ("memory", check_memory, REBUILD),
        ("physics", check_physics, REBUILD),
        ("runs folder", lambda: check_runs_folder(runs_root), ANOTHER_FOLDER),
        ("disk space", lambda: check_disk_space(runs_root), ANOTHER_FOLDER),
        ("disk speed", lambda: check_disk_speed(runs_root), ANOTHER_FOLDER),
        ("git", check_git, REBUILD),
        ("dask settings", check_dask_settings, REBUILD),
        ("prefect server", check_prefect_server, REBUILD),
    ]
    for name, probe, advice in probes:
        try:
            checks.append(probe())
        # Anything broken must become a row of the table instead of ending the command.
        except Exception as error:
            checks.append(Check(name, "fail", f"{type(error).__name__}: {error}", "no error", advice))
    return checks


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Check:
    """Check the version of the Python interpreter."""
    advice = f"install Python 3.11 or newer, then {REINSTALL}"
    return _held("python", version >= (3, 11), f"{version[0]}.{version[1]}", ">= 3.11", advice, "fail")


def check_packages(requirements: list[str] | None = None) -> Iterator[Check]:
    """Check the versions of all required packages."""
    if requirements is None:
        try:
            requirements = metadata.requires(DISTRIBUTION) or []
        except metadata.PackageNotFoundError:
            yield Check(DISTRIBUTION, "fail", "not installed", "installed", REINSTALL)
            return
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, required = requirement.name, str(requirement.specifier) or "any version"
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check(name, "fail", "not installed", required, REINSTALL)
            continue
        advice = f"{sys.executable} -m pip install '{name}{requirement.specifier}'"
        yield _held(name, requirement.specifier.contains(found, prereleases=True), found, required, advice, "fail")


def check_cores() -> Check:
    """Check the number of cores available to this process."""
    # Imported here, so that a broken installation becomes a row of the table.
    from metaloom.flows.rollouts.workers import usable_cores

    cores, advice = usable_cores(), "train with --workers 0: a worker would compete with the trainer for the core"
    return _held("cores", cores > 1, str(cores), "2 or more", advice)


def check_memory(available_bytes: float | None = None) -> Check:
    """Check the amount of free memory."""
    found = available_bytes
    if found is None:
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
            found = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        except (OSError, StopIteration):
            found = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    advice = "close other programs, or use fewer workers or tasks: --workers 0 --set num_tasks=10"
    enough = found >= LOW_MEMORY_BYTES
    return _held("memory", enough, f"{size(found)} free", f"{size(LOW_MEMORY_BYTES)} free", advice)


def check_physics() -> Check:
    """Check MuJoCo's batched simulation by stepping two half-cheetahs once."""
    with closing(make_batch_env(EnvConfig(name="half-cheetah-dir"), 2, 1)) as env:
        env.reset(np.array([[1.0], [-1.0]]), np.array([1, 2], np.uint64))
        outcome = env.step(np.zeros((2, env.action_size)), np.arange(2))
    if np.isfinite(outcome.observations).all():
        return Check("physics", "ok", f"MuJoCo {metadata.version('mujoco')}, batched step works", "mujoco.batch")
    return Check("physics", "fail", "a batched step returned NaN", "finite numbers", REBUILD)


def check_runs_folder(runs_root: Path) -> Check:
    """Check that the runs folder supports files, hard links and locks, which some network file systems lack."""
    required = "writable, with hard links and locks"
    try:
        with tempfile.TemporaryDirectory(prefix=".metaloom-doctor-", dir=_existing(runs_root)) as probe:
            original = Path(probe, "file")
            original.write_bytes(b"metaloom")
            os.link(original, Path(probe, "link"))
            os.replace(original, Path(probe, "renamed"))
            with Path(probe, "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return Check("runs folder", "fail", f"{runs_root}: {error.strerror or error}", required, ANOTHER_FOLDER)
    return Check("runs folder", "ok", str(runs_root), required)


def check_disk_space(runs_root: Path, free_bytes: float | None = None) -> Check:
    """Check the free space on the disk that holds the runs folder."""
    free = shutil.disk_usage(_existing(runs_root)).free if free_bytes is None else free_bytes
    found, required = f"{size(free)} free", f"{size(LOW_DISK_BYTES)} free"
    advice = "delete runs you do not need (metaloom ls shows their sizes), or export METALOOM_RUNS=/path/to/runs"
    otherwise = "warn" if free >= FULL_DISK_BYTES else "fail"
    return _held("disk space", free >= LOW_DISK_BYTES, found, required, advice, otherwise)


def check_disk_speed(runs_root: Path) -> Check:
    """Check the speed of durable (fsync) writes."""
    rate = _fsync_bytes_per_second(_existing(runs_root))
    found, required = f"{size(rate)}/s with fsync", f"{size(SLOW_FSYNC_BYTES_PER_SECOND)}/s"
    advice = "training will wait for the disk; keep runs on a faster one: export METALOOM_RUNS=/path/to/runs"
    return _held("disk speed", rate >= SLOW_FSYNC_BYTES_PER_SECOND, found, required, advice)


def check_git() -> Check:
    """Check that git, which records the code version of a run, is installed."""
    found, advice = shutil.which("git"), "install git, so that runs record the version of the code"
    return _held("git", bool(found), found or "not installed", "optional", advice)


def check_dask_settings() -> Check:
    """Check that the user's and the machine's Dask settings files, which workers need, can be read."""
    try:
        import_module("dask.config")
    except (ValueError, OSError) as error:  # the message names the file
        return Check("dask settings", "fail", str(error), "YAML with a mapping", "repair that file, or remove it")
    return Check("dask settings", "ok", "readable", "YAML with a mapping")


def check_prefect_server(url: str | None = None) -> Check:
    """Check that Prefect's settings can be read and, if they name a server, whether the server answers."""
    required = "optional; for `prefect deployment run` only"
    try:
        if url is None:
            # Prefect prints errors about its settings before it raises them.
            with redirect_stderr(StringIO()):
                from prefect.settings import get_current_settings

                url = get_current_settings().api.url or ""
    except ValueError as error:  # from TOML, pydantic, or Prefect's settings
        return Check("prefect server", "warn", *_unreadable_settings(error))
    if not url:
        return Check("prefect server", "ok", "none configured", required)
    if not url.startswith(("http://", "https://")):
        return Check("prefect server", "warn", url, "an http address", "correct PREFECT_API_URL")
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=PREFECT_TIMEOUT_SECONDS):
            return Check("prefect server", "ok", f"{url} answers", required)
    except OSError:
        return Check("prefect server", "ok", f"{url} is not running", required, "metaloom serve starts it")


def _held(
    name: str, is_met: bool, found: str, required: str, advice: str, otherwise: Literal["warn", "fail"] = "warn"
) -> Check:
    """Return a Check: ok if the requirement is met, otherwise a warning or failure with advice."""
    return Check(name, "ok" if is_met else otherwise, found, required, "" if is_met else advice)


def _existing(folder: Path) -> Path:
    """Return the folder or its nearest existing ancestor, since a check must not create folders."""
    folder = folder.absolute()
    nearest = next(candidate for candidate in (folder, *folder.parents) if candidate.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is a file")
    return nearest


def _fsync_bytes_per_second(folder: Path) -> float:
    with tempfile.NamedTemporaryFile(prefix=".metaloom-doctor-", dir=folder) as file:
        data = os.urandom(PROBE_BYTES)
        began = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return PROBE_BYTES / (time.perf_counter() - began)


def _unreadable_settings(error: ValueError) -> tuple[str, str, str]:
    """Return the problem with Prefect's settings, what is required, and a remedy."""
    home = os.environ.get("PREFECT_HOME") or "~/.prefect"
    profiles = os.environ.get("PREFECT_PROFILES_PATH") or f"{home}/profiles.toml"
    for file in (Path("prefect.toml"), Path("pyproject.toml"), Path(profiles).expanduser()):
        try:
            tomllib.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as problem:
            return f"{file}: {problem}", "TOML", f"repair {file}, or remove it"
    if not isinstance(error, ValidationError):
        return str(error), "settings that Prefect can read", f"repair {_SETTINGS}"
    problem = error.errors()[0]
    found = f"{error.title}.{'.'.join(map(str, problem['loc']))} = {problem['input']!r}: {problem['msg']}"
    names = [name for name, value in os.environ.items() if name.startswith("PREFECT_") and value == problem["input"]]
    return found, "settings that Prefect can read", f"unset {' '.join(names)}" if names else f"repair {_SETTINGS}"


STEPS = 100
_ADVICE = "see docs/hostile_environments.md"


def env_config(name: str, assignments: Sequence[str] = ()) -> EnvConfig:
    """Return the environment configuration for a name and `env.options.x=value` assignments."""
    settings = override({"env": {"name": name}}, assignments)
    try:
        if settings.keys() != {"env"}:
            raise UsageError(f"cannot set {', '.join(settings.keys() - {'env'})}; only env settings are allowed")
        return EnvConfig.model_validate(settings["env"])
    except ValidationError as error:
        found = "; ".join(f"env.{problem['loc'][0]}: {problem['msg']}" for problem in error.errors())
        raise UsageError(f"{found}; use env settings such as env.options.NAME or env.wrappers") from None


def check_environment(config: EnvConfig) -> list[Check]:
    """Check that an environment's episodes are valid and reproducible; return the results up to the first failure."""
    required = "identical results for identical seeds"
    try:
        config, notes = settled(config, gymnasium_limit(config.name) or STEPS, always=True)
    except EnvError as error:
        return [Check("repeats", "fail", str(error), required, _ADVICE)]
    batch: BatchEnv | None = None
    try:
        batch = make_batch_env(config, ROWS)
        with closing(batch):  # in this process, where errors can be read
            answers = Rehearsal(config, STEPS).play(batch, range(ROWS))
    except Exception as error:
        if batch is None and isinstance(error, EnvError):  # a wrong name or option, with a remedy
            return [Check("episodes", "fail", str(error), "an environment that can be created")]
        return [Check("episodes", "fail", f"{type(error).__name__}: {error}", "valid return values", _ADVICE)]
    count = 1 + max(episode[-1].step for episode in answers)
    episodes = Check("episodes", "ok", f"{ROWS} of up to {count} steps", "valid return values")
    found = "identical in two runs" if config.copies == "kept" else "identical on new copies"
    return [episodes, Check("repeats", "ok", found, required), *(Check("notice", "ok", note, "") for note in notes)]
