"""Processor seconds (user and system) that a command takes before it has done anything.

    python benchmarks/startup.py [REPEATS]

Lists the least and the median of several calls, and the slowest imports of the slowest command.
"""

import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence

LIMIT = 0.6
COMMANDS = {
    "import metaloom": ["-c", "import metaloom"],
    "--version": ["-m", "metaloom.flows.cli", "--version"],
    "--help": ["-m", "metaloom.flows.cli", "--help"],
    "train --help": ["-m", "metaloom.flows.cli", "train", "--help"],
    "ls": ["-m", "metaloom.flows.cli", "ls"],
    "no such command": ["-m", "metaloom.flows.cli", "trian"],
    "no such option": ["-m", "metaloom.flows.cli", "train", "promp-point-corner", "--sett", "seed=2"],
    "no such recipe": ["-m", "metaloom.flows.cli", "train", "promp-point-cornr"],
    "no such key": ["-m", "metaloom.flows.cli", "train", "promp-point-corner", "--set", "algorithm.iner_lr=1"],
    "no such value": ["-m", "metaloom.flows.cli", "train", "promp-point-corner", "--set", "algorithm.inner_lr=x"],
    "no such key of ppo": ["-m", "metaloom.flows.cli", "train", "ppo", "--set", "algorithm.clip_ep=1"],
    "no such value of sac": ["-m", "metaloom.flows.cli", "train", "sac", "--set", "algorithm.tau=x"],
    "no such run": ["-m", "metaloom.flows.cli", "show", "nothing-here"],
}


def processor_seconds(arguments: Sequence[str], runs: str) -> float:
    """Return the processor seconds of one call of Python."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], env={**os.environ, "METALOOM_RUNS": runs}, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def slowest_imports(arguments: Sequence[str], runs: str, count: int) -> list[tuple[float, str]]:
    """Return the imports that take longest, those they lead to included, with their milliseconds."""
    command = [sys.executable, "-X", "importtime", *arguments]
    told = subprocess.run(command, env={**os.environ, "METALOOM_RUNS": runs}, capture_output=True, text=True).stderr
    found = re.findall(r"^import time: +\d+ \| +(\d+) \| +([\w.]+)$", told, flags=re.MULTILINE)
    return sorted(((int(micro) / 1000, name) for micro, name in found), reverse=True)[:count]


def main() -> None:
    """Measure every command."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    medians: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as runs:
        print(
            f"{'command':20} {'least':>8} {'median':>8}   processor seconds of {repeats} calls; at most {LIMIT} wanted"
        )
        for name, arguments in COMMANDS.items():
            seconds = [processor_seconds(arguments, runs) for _ in range(repeats)]
            medians[name] = statistics.median(seconds)
            print(f"{name:20} {min(seconds):8.2f} {medians[name]:8.2f}{'   <-- too long' * (medians[name] > LIMIT)}")
        slowest = max(medians, key=medians.__getitem__)
        print(f"\nslowest imports of: {slowest}")
        for milliseconds, module in slowest_imports(COMMANDS[slowest], runs, 15):
            print(f"{milliseconds:8.0f} ms  {module}")


if __name__ == "__main__":
    main()
