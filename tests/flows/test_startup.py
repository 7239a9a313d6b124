"""Commands that compute nothing import no numerics. benchmarks/startup.py tells how long they take."""

import json
import os
import subprocess
import sys

HEAVY = ("torch", "gymnasium", "mujoco", "dask", "distributed", "prefect", "pyarrow", "pandas", "matplotlib", "zarr")
TRAIN = ("train", "promp-point-corner", "--set")
WITHOUT_SETTINGS = [
    (("--help",), 0, "Train a new run"),
    (("train", "--help"), 0, "--recipe"),
    (("--version",), 0, "0."),
    (("ls",), 0, "no runs in"),
    (("ls", "--since", "yesterday"), 2, "30m, 12h"),
    (("cancel", "nothing-here"), 2, "nothing-here"),
    (("logs", "nothing-here"), 2, "nothing-here"),
    (("rm",), 0, "no removal to finish"),
    (("trian",), 2, 'Did you mean "train"'),
    (("serve", "--port", "0"), 2, "--port"),
    (("view", "nothing-here"), 2, "no such folder"),
    (("show", "nothing-here"), 2, "nothing-here"),
    (("replay", "nothing-here@last"), 2, "last"),
    (("train", "promp-point-corner", "--sett", "seed=2"), 2, "--sett"),
]
"""They import no pydantic either."""
CASES = [
    *WITHOUT_SETTINGS,
    (("watch", "nothing-here"), 2, "nothing-here"),
    (("__complete", "train", "promp-p"), 0, "promp-point-corner"),
    (("train", "promp-point-cornr"), 2, "did you mean promp-point-corner"),
    ((*TRAIN, "algorithm.iner_lr=1"), 2, "did you mean inner_lr"),
    ((*TRAIN, "algorithm.inner_lr=x"), 2, "algorithm.inner_lr"),
    ((*TRAIN, "seed"), 2, "expected KEY=VALUE"),
    (("train", "ppo", "--set", "algorithm.clip_ep=1"), 2, "did you mean clip_eps"),
    (("train", "sac", "--set", "num_tasks=x"), 2, "num_tasks"),
]
RUN_ALL = """
import gc, io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from metaloom.flows.cli import run
for tokens, heavy in json.loads(sys.argv[1]):
    told = io.StringIO()
    with redirect_stdout(told), redirect_stderr(told):
        code = run(tokens)
    print(json.dumps([code, told.getvalue(), [name for name in heavy if name in sys.modules]]))
assert gc.isenabled()
"""


def test_help_lists_and_refusals_import_no_numerics(tmp_path):
    commands = [(case[0], (*HEAVY, "pydantic") if case in WITHOUT_SETTINGS else HEAVY) for case in CASES]
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, json.dumps(commands)],
        env={**os.environ, "METALOOM_RUNS": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for (tokens, code, expected), line in zip(CASES, done.stdout.splitlines(), strict=True):
        found, told, imported = json.loads(line)
        assert (found, imported) == (code, []), tokens
        assert expected in told, tokens
