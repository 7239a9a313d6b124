"""Check that no number has moved: small runs against a stored table, and reference runs against their records.

`make digests` trains a small run of each algorithm for three iterations, and computes one iteration of every shipped
reference run again. `make digests ARGS=--write` replaces the table, for a change that is meant to move numbers.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

TABLE = Path(__file__).parent / "golden" / "digests.json"
# Any x86-64 processor since 2013 has these CPU code paths, so the table holds on all of them.
ARITHMETIC = {
    "OPENBLAS_CORETYPE": "Haswell",
    "ATEN_CPU_CAPABILITY": "avx2",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
NORMALIZED = ("policy.normalize_observations=true", "processing.scale_rewards=true")
ON_A_ROBOT = ("promp-half-cheetah-dir", "num_tasks=2", "episodes_per_task=2", "max_episode_steps=8")


def digests_of_small_runs() -> dict[str, str]:
    """Return the digest of all outputs of a small run of each algorithm, by its name."""
    sys.path.insert(0, str(Path(__file__).parent / "helpers"))
    from small_runs import SMALL_RUNS

    normalized = {f"{name}, normalized": (*SMALL_RUNS[name], *NORMALIZED) for name in ("ppo", "promp", "rl2")}
    runs = {**SMALL_RUNS, "a robot": ON_A_ROBOT, **normalized}
    return {name: _digest_of_run(*settings) for name, settings in runs.items()}


def _digest_of_run(recipe: str, *settings: str) -> str:
    from metaloom.flows.commands.train import train
    from metaloom.flows.recipes import new_config
    from metaloom.flows.rollouts.workers import Backend
    from metaloom.storage import open_run

    config = new_config(recipe, [*settings, "iterations=3", "policy.hidden_sizes=[8]"])
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder) / "run", backend=Backend(workers=0))
        run = open_run(Path(folder) / "run")
        outputs = sorted((str(ref), run.record(ref).digest) for ref in run.refs())
    return hashlib.sha256(json.dumps(outputs).encode()).hexdigest()


def differing_references() -> Iterator[str]:
    """Compute one iteration of every shipped reference run again, and return those that differ from their records."""
    listed = json.loads(_metaloom("reference", "ls", "--json").stdout)
    for name, iterations in ((row["name"], row["iterations"]) for row in listed):
        wanted = f"{name}@{zlib.crc32(name.encode()) % iterations}"  # early ones of some runs, late ones of others
        identical = _metaloom("reference", "verify", wanted).returncode == 0
        _print_verdict(wanted, identical)
        if not identical:
            yield wanted


def _metaloom(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "metaloom.flows.cli", *arguments]
    # A reference is computed with the CPU code paths that its record names.
    env = {name: value for name, value in os.environ.items() if name not in ARITHMETIC}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def _print_verdict(name: str, equal: bool) -> None:
    print(f"{'equal' if equal else 'DIFFERS':8} {name}", flush=True)


def main() -> int:
    """Compute, print and compare; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the stored table by what is computed")
    parser.add_argument("--small", action="store_true", help="skip the reference runs")
    options = parser.parse_args()
    found = digests_of_small_runs()
    if options.write:
        TABLE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")
    stored = json.loads(TABLE.read_text("utf-8"))
    differ = [name for name in sorted({*found, *stored}) if found.get(name) != stored.get(name)]
    for name in found:
        _print_verdict(name, name not in differ)
    differ += [] if options.small else differing_references()
    print(f"{len(differ)} differ{': ' + ', '.join(differ) if differ else ''}")
    return 1 if differ else 0


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ARITHMETIC.items()):
        # Libraries read these when they are loaded.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ARITHMETIC})
    sys.exit(main())
