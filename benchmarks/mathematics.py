"""Seconds and bytes of an iteration with the mathematics here and on workers: `python benchmarks/mathematics.py`.

Trains a recipe for some iterations with every number of worker processes, first with the mathematics in the trainer,
then with it on the workers. Of the best iteration but the first of each it tells the seconds of its stages, and the
bytes that went between the trainer and its workers. All have to give the same digests.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import tempfile
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.observer import IterationReport, Observer
from metaloom.flows.recipes import load_settings
from metaloom.flows.rollouts.traffic import Traffic
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import RunConfig, build_config

STAGES = ("collect_rollouts", "process_samples", "adapt", "meta_optimize")


class Told(NamedTuple):
    """What an iteration's report tells: seconds by stage, and the bytes of the session so far."""

    seconds: Mapping[str, float]
    sent: int
    received: int


def main() -> None:
    args = _arguments()
    config = build_config(override(load_settings(args.recipe), [*args.set, f"iterations={args.iterations}"]))
    backends = [Backend(workers=0)]
    backends += [Backend(workers=n, mathematics=where) for n in args.workers for where in ("here", "workers")]
    print(" | ".join(("workers", "mathematics", *STAGES, "iteration", "MB to workers", "MB from workers")))
    found: set[str] = set()
    for backend in backends:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            told = _train(config, Path(folder) / "run", backend)
            run = storage.open_run(Path(folder) / "run")
            found.add(run.record(run.last_ref(args.iterations - 1)).digest)
        print(f"{backend.workers} | {backend.mathematics if backend.workers else 'here'} | {_row(told)}", flush=True)
    assert len(found) == 1, "digests differ"


def _train(config: RunConfig, path: Path, backend: Backend) -> list[Told]:
    told: list[Told] = []

    def note(report: IterationReport) -> None:
        traffic = report.traffic or Traffic()
        told.append(Told(report.stage_seconds, traffic.sent_bytes, traffic.received_bytes))

    train(config, path, backend=backend, observer=Observer(iteration_done=note))
    return told


def _row(told: list[Told]) -> str:
    before, best = min(pairwise(told), key=lambda pair: sum(pair[1].seconds.values()))
    seconds: dict[str, float] = defaultdict(float)
    for name, value in best.seconds.items():
        seconds[name.partition(".")[0]] += value
    found = [*(seconds[stage] for stage in STAGES), sum(seconds.values())]
    found += [(best.sent - before.sent) / 1e6, (best.received - before.received) / 1e6]
    return " | ".join(f"{value:.2f}" for value in found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="promp-half-cheetah-dir")
    parser.add_argument("--set", nargs="*", default=[], help="settings, as KEY=VALUE")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--folder", type=Path, default=None, help="where runs are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
