"""Commands that compute nothing import no numerics. benchmarks/startup.py tells how long they take."""

import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "gymnasium", "mujoco", "dask", "distributed", "prefect", "pyarrow", "pandas", "matplotlib", "zarr")
TRAIN = ("train", "promp-point-corner", "--set")
RUN = "import sys; from metaloom.flows.cli import run; code = run(sys.argv[1:])"
TELL = "print('imported', *(name for name in {heavy} if name in sys.modules), file=sys.stderr); sys.exit(code)"


@pytest.mark.parametrize(
    ("tokens", "code", "told"),
    [
        (("--help",), 0, "Train a new run"),
        (("train", "--help"), 0, "--recipe"),
        (("--version",), 0, "0."),
        (("ls",), 0, "no runs in"),
        (("trian",), 2, 'Did you mean "train"'),
        (("train", "promp-point-corner", "--sett", "seed=2"), 2, "--sett"),
        (("train", "promp-point-cornr"), 2, "did you mean promp-point-corner"),
        ((*TRAIN, "algorithm.iner_lr=1"), 2, "did you mean inner_lr"),
        ((*TRAIN, "algorithm.inner_lr=x"), 2, "algorithm.inner_lr"),
        ((*TRAIN, "seed"), 2, "required KEY=VALUE"),
        (("train", "ppo", "--set", "algorithm.clip_ep=1"), 2, "did you mean clip_eps"),
        (("train", "sac", "--set", "num_tasks=x"), 2, "num_tasks"),
        (("show", "nothing-here"), 2, "nothing-here"),
        (("replay", "nothing-here@last"), 2, "last"),
    ],
)
def test_help_lists_and_refusals_import_no_numerics(tokens, code, told, tmp_path):
    program = f"{RUN}; {TELL.format(heavy=HEAVY)}"
    done = subprocess.run(
        [sys.executable, "-c", program, *tokens],
        env={**os.environ, "METALOOM_RUNS": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert told in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1].split() == ["imported"]
