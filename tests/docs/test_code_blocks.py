"""Every code block of the documentation runs as it is printed, in the order of its page; `pages` says how.

Runs are made small: what the page leaves at its default is replaced by the sizes below, and what it prints itself by a
comment `sizes` only. Rollouts are collected in this process; tests/flows/test_workers.py starts workers.
"""

import os
import re
import shutil
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
from pages import Block, Commands, Page, blocks_of
from small_runs import SMALL_RUNS

from metaloom.flows import cli, recipes, trust
from metaloom.flows.cli import generated
from metaloom.flows.cli import train as training
from metaloom.flows.rollouts.workers import Backend

ROOT = Path(__file__).parents[2]
PAGES = [name for name in ("README.md", "CONTRIBUTING.md")] + sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")
)
SIZES = ("iterations", "num_tasks", "episodes_per_task", "min_steps", "max_episode_steps", "algorithm.")
NOT_RUN = 31
"""Number of blocks of all pages that need a server, a cluster, the checkout itself or an installation."""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm")]


def found(name: str) -> list[Block]:
    return [*blocks_of((ROOT / name).read_text(encoding="utf-8"))]


@pytest.fixture
def small(monkeypatch):
    """Shrinks new runs, and returns the list of settings that override those on the page."""
    new_config, forced = recipes.new_config, []

    def small_config(recipe, assignments=()):
        algorithm = new_config(recipe, assignments).algorithm.name
        own = any(item.startswith(("policy=", "policy.network=")) for item in assignments)
        sizes = [] if own else ["policy.hidden_sizes=[4]"]
        sizes += [item for item in SMALL_RUNS.get(algorithm, ())[1:] if item.startswith(SIZES)]
        return new_config(recipe, ["iterations=2", *sizes, *assignments, *forced])

    monkeypatch.setattr(recipes, "new_config", small_config)
    monkeypatch.setattr(generated, "Backend", lambda threads=1, **others: Backend(workers=0, threads=threads))
    monkeypatch.setattr(training, "_next_steps", lambda folder: f"run {folder}")  # else eight pictures for every run
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # these runs need not survive the machine
    return forced


def command(tokens: list[str]) -> int:
    """Run a command as a process of its own would: it trusts what is remembered, and shows what it did not expect."""
    trust._trusted_here.clear()
    try:
        return cli.run(tokens)
    except Exception:
        traceback.print_exc()
        return 1


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture
def page(tmp_path, prepared, tmp_path_factory, monkeypatch):
    """A fresh folder and namespace, the folder on the path as it is for a program that lies in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("METALOOM_RUNS", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(ROOT / "examples", "examples", ignore=shutil.ignore_patterns("runs", "__pycache__", "notebooks"))
    Path("benchmarks").symlink_to(ROOT / "benchmarks")
    before, variables = {*sys.modules}, dict(os.environ)
    yield Page(Commands(tmp_path_factory.mktemp("bin"), command), prepared)
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    for name in os.environ.keys() - variables:
        del os.environ[name]


@pytest.mark.parametrize("name", [name for name in PAGES if found(name)])
def test_every_block_of_a_page_runs_in_order(name, page, small):
    for block in found(name):
        if "not run" in block.notes:
            continue
        text, sizes = block.text, block.notes.get("sizes", "").split()
        small[:] = [size for size in sizes if not size.startswith("--")]
        for option, value in (size.split("=") for size in sizes if size.startswith("--")):
            text, count = re.subn(rf"{option} \d+", f"{option} {value}", text)
            assert count, f"no {option} in the block at {name}:{block.line}"
        try:
            page.run(replace(block, text=text), f"{name}:{block.line}")
        except BaseException as problem:
            problem.add_note(f"in the block at {name}:{block.line}")
            raise


def test_few_blocks_are_not_run_and_each_says_why():
    left_out = [(f"{name}:{b.line}", b.notes["not run"]) for name in PAGES for b in found(name) if "not run" in b.notes]
    sys.stdout.writelines(f"{place} is not run: {reason}\n" for place, reason in left_out)
    assert len(left_out) == NOT_RUN
    assert all(reason for _, reason in left_out)
