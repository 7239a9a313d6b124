"""Fixtures and rules for all tests."""

import atexit
import fcntl
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from archives import unpack
from browsing import NO_BROWSER
from hypothesis import HealthCheck, settings
from leaks import left_over, listening, present
from warm import forked_processes

# pytest-xdist sets it, and so may a shell: commands are to find the same width with and without.
os.environ.pop("COLUMNS", None)

# A shell that starts the tests in the background lets them ignore it, and with them all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# onnxruntime would send usage data to its maker; it reads this once, when it is imported.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"


def _end_without_prefect() -> None:
    """Once a flow has run in a process, a service of Prefect's fails at the end of every process forked from it."""
    calls = threading._threading_atexits
    calls[:] = [call for call in calls if not call.func.__module__.startswith("prefect.")]


os.register_at_fork(after_in_child=_end_without_prefect)

# What tests trust is nothing that the user trusts; processes that they start find it too.
_CONFIG = tempfile.TemporaryDirectory(prefix="metaloom-tests-")
atexit.register(_CONFIG.cleanup)
os.environ["XDG_CONFIG_HOME"] = _CONFIG.name

# How long an example takes is not what a test is about, and a busy machine has its own idea of it.
settings.register_profile(
    "untimed", parent=settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")


# Whole files go to one of two processes. One of these at the end would leave the other process idle for long.
_LONG_FILES = (
    "tests/flows/test_prefect_server.py",
    "tests/docs/test_code_blocks.py",
    "tests/storage/test_object_storage.py",
    "tests/flows/test_view_chromium.py",
    "tests/flows/test_hostile_envs.py",
    "tests/reliability/test_power_loss_of_commands.py",
    "tests/flows/test_report_chromium.py",
    "tests/reliability/test_processes.py",
    "tests/flows/test_interrupt.py",
    "tests/flows/test_references.py",
    "tests/flows/test_training.py",
    "tests/flows/test_sweep.py",
    "tests/storage/test_verify.py",
    "tests/test_wheel.py",
)


def pytest_collection_modifyitems(items):
    """Begin with the files that take longest, the longest first."""
    places = {name: place for place, name in enumerate(_LONG_FILES)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no garbage among the million objects of what is imported, which stay: it takes a third of the time."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """End with what was skipped for want of a browser, which everybody is meant to have."""
    yield
    if skipped := [
        report for report in terminalreporter.stats.get("skipped", ()) if NO_BROWSER in str(report.longrepr)
    ]:
        terminalreporter.write_line(f"skipped for want of a browser: {len(skipped)}; {NO_BROWSER}", yellow=True)


# When a library's threads end is not ours to say, so a target of its own looks: `make leaks`.
_LOOKS = bool(os.environ.get("METALOOM_LEAKS"))


@pytest.fixture(autouse=_LOOKS)
def _leaves_nothing():
    """No handler, variable, thread, process or Dask cluster outlives its test."""
    before = present()
    yield
    if left := left_over(before):
        pytest.fail(f"the test leaves {'; '.join(left)}", pytrace=False)


@pytest.fixture(autouse=_LOOKS, scope="module")
def _module_leaves_nothing(request):
    """Nor do a module's own outlive it, nor its servers."""
    before, ports = present(), listening()
    yield
    if request.session.shouldfail or request.session.shouldstop:
        return  # pytest tears down while it ends, where a failure would be taken for one of its own
    if left := left_over(before) + left_over(ports, listening):
        pytest.fail(f"the module leaves {'; '.join(left)}", pytrace=False)


@pytest.fixture(scope="module")
def warm() -> Iterator[None]:
    """Processes that the module starts begin with their imports done: none of its tests is about starting one."""
    with forked_processes():
        yield


@pytest.fixture(scope="session")
def wheel(tmp_path_factory, pytestconfig, worker_id) -> Path:
    """The wheel, built once for all processes of the suite."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "release"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = [*folder.glob("*.whl")] or [_release(folder, pytestconfig)]
    return found[0]


def _release(folder: Path, pytestconfig: pytest.Config) -> Path:
    """Build from the source distribution of a copy, because a build leaves files beside the sources."""
    skipped = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "tests", "runs")
    shutil.copytree(pytestconfig.rootpath, folder / "source", symlinks=True, ignore=skipped)
    _build("sdist", folder / "source")
    (archive,) = folder.glob("*.tar.gz")
    unpack(archive, folder)
    _build("wheel", folder / archive.name.removesuffix(".tar.gz"))
    (file,) = folder.glob("*.whl")
    return file


def _build(what: str, source: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.build_{what}('..')"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, text=True)
