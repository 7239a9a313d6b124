"""An exercise: one more stored array per episode takes three edits, made here in a copy of the sources."""

import os
import shutil
import subprocess
import sys

EDITS = {
    # What it is. The default is for runs that were stored before.
    "pipeline/types.py": (
        "    initial_state: Array\n",
        "    success: Array | None = field(default=None, metadata=_each_episode(np.bool_))\n",
    ),
    # What is told of it on disk.
    "storage/format/stages.py": (
        '    _plan("truncated", "B E", "the step limit ended the episode"),\n',
        '    _plan("success", "B E", "the episode had a step with a positive reward"),\n',
    ),
    # Where it is from.
    "stages/collect_rollouts.py": (
        "            initial_state=initial_state.reshape(self.B, self.E, -1),\n",
        "            success=(self.rewards > 0).any(axis=0).reshape(self.B, self.E),\n",
    ),
}

CHECKS = """
from pathlib import Path
import sys
import numpy as np
import pyarrow.parquet as pq
import zarr
import metaloom
from metaloom.flows import cli, exports

root, env = Path(sys.argv[1]), {"name": "point-corner", "options": {"reward": "sparse"}}
settings = {**metaloom.load_settings("promp-point-corner"), "iterations": 2, "num_tasks": 3, "episodes_per_task": 4}
settings = {**settings, "env": env, "max_episode_steps": 30, "policy": {"hidden_sizes": [8]}}
metaloom.train(metaloom.build_config(settings), root / "run", backend=metaloom.Backend(workers=0))

run = metaloom.open_run(root / "run")
episodes = run[1].rollouts(0)
assert episodes.success.dtype == np.bool_
assert np.array_equal(episodes.success, (episodes.rewards > 0).any(axis=2))
stored = zarr.open(str(root / "run" / "data.zarr"))["rollouts_0/success"]
assert np.array_equal(stored[1], episodes.success)
assert stored.metadata.dimension_names == ("iteration", "task", "episode")
assert run.episodes([1])["success"].to_numpy()[:12].tolist() == episodes.success.ravel().tolist()
assert sum(run.steps(1, steps=0)["success"].to_pylist()) == episodes.success.sum()
assert cli.run(["replay", str(root / "run")]) == 0
assert cli.run(["verify", str(root / "run")]) == 0
for name in ("parquet", "histories"):
    exports.export(run, root / name, name)
assert pq.read_table(root / "parquet" / "episodes.parquet")["success"].equals(run.episodes()["success"])
histories = pq.ParquetFile(min((root / "histories").glob("*.parquet"))).read()
assert sorted(histories["success"].to_pylist()) == sorted(run.episodes([0])["success"].to_pylist())
print("all found")
"""


def test_an_array_that_three_files_declare_is_checked_stored_replayed_tabled_and_exported(tmp_path, pytestconfig):
    for package in (
        "metaloom",
        *(path.name for path in (pytestconfig.rootpath / "metaloom").iterdir() if path.is_symlink()),
    ):
        shutil.copytree(pytestconfig.rootpath / package, tmp_path / package, symlinks=True)
    for file, (before, added) in EDITS.items():
        source = (tmp_path / file).read_text(encoding="utf-8")
        assert source.count(before) == 1, f"{file} no longer has the line behind which the exercise adds one"
        (tmp_path / file).write_text(source.replace(before, before + added), encoding="utf-8")
    command = [sys.executable, "-W", "error", "-c", CHECKS, str(tmp_path)]
    told = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert told.stdout.endswith("all found\n"), told.stdout + told.stderr
