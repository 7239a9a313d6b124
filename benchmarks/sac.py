"""SAC beside Stable-Baselines3's SAC on the same environment with the same settings: returns and gradient steps.

    pip install -e .[bench]
    python benchmarks/sac.py --env HalfCheetah-v5 --steps 50000 --seeds 1 2 3 4 5 --plot sac.png
    python benchmarks/sac.py --only sb3 --seeds 1

Both act at random for 10,000 steps; then each whole episode is followed by as many gradient steps as it had
environment steps: minibatches of 256 of the last million steps, Adam at 3e-4, γ 0.99, targets that keep 0.995 of their
old value, two layers of 256 for policy and Q-functions, gradients of any length, a temperature that starts at 0.2 and
is learned for an entropy of minus the number of actions. Weights start from Glorot's distribution and Adam's ε is 1e-5
here, PyTorch's and 1e-8 there. After every fifth update (`--every`) five deterministic episodes (`--test-episodes`)
test the policy, each seed's from initial states of its own.

Each seed runs the two one after the other in this process, on `--threads` each. A JSON file per program and seed is
written to `--out` as training goes on, and read instead of training where it is complete. Metaloom's updates include
drawing and storing the numbers of the rows; it keeps every batch on disk, Stable-Baselines3 nothing.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from sac_metaloom import train_metaloom
from sac_reference import Progress, Row, Tests, train_reference
from side_by_side import Curve, compared_returns, complete_row, draw, last_return

PROGRAMS = ("metaloom", "sb3")


def main() -> None:
    """Train what is not there yet, then print both beside each other."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    # Metaloom computes on all cores that its process may use, and gives the same numbers on any.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    args.out.mkdir(parents=True, exist_ok=True)
    trained = (args.only,) if args.only else PROGRAMS
    rows: dict[str, list[Row]] = {program: [] for program in trained}
    for seed in args.seeds:
        for program, found in rows.items():
            found.append(_trained(program, seed, args))
            print(json.dumps(_summary(found[-1])), flush=True)
    last = {program: [_last_test_return(row) for row in found] for program, found in rows.items()}
    for line in [*_table(rows), "", *compared_returns(last)]:
        print(line)
    if args.plot:
        curves = {program: [_curve(row) for row in found] for program, found in rows.items()}
        draw(args.plot, f"SAC on {args.env}", "return of deterministic test episodes", curves)


def _trained(program: str, seed: int, args: argparse.Namespace) -> Row:
    """Contents of a run's file, once it is complete."""
    path = args.out / f"{program}_seed{seed}.json"
    about = {"program": program, "env": args.env, "seed": seed, "steps": args.steps, "threads": args.threads}
    about |= {"every": args.every, "test_episodes": args.test_episodes}
    if row := complete_row(path, about):
        return row
    began = time.perf_counter()

    def write(progress: Progress, *, complete: bool = False) -> None:
        row: Row = {**about, "complete": complete, "seconds": time.perf_counter() - began, **asdict(progress)}
        path.write_text(json.dumps(row))

    train = train_reference if program == "sb3" else train_metaloom
    write(train(args.env, args.steps, seed, Tests(args.every, args.test_episodes), write), complete=True)
    return json.loads(path.read_text())


def _summary(row: Row) -> Row:
    """The return of the last tenth of the steps, and the speed of updates."""
    return {
        "program": row["program"],
        "seed": row["seed"],
        "last_return": round(last_return(row), 1),
        "last_test_return": round(_last_test_return(row), 1),
        "gradient_steps_per_second": round(row["gradient_steps"] / row["update_seconds"], 1),
        "cpu_ms_per_gradient_step": round(1e3 * row["update_cpu_seconds"] / row["gradient_steps"], 2),
        "seconds": round(row["seconds"]),
    }


def _last_test_return(row: Row) -> float:
    return float(np.mean(row["evaluations"][-1]["returns"]))


def _table(rows: Mapping[str, Sequence[Row]]) -> list[str]:
    """Markdown: the mean test return over seeds, in brackets its smallest and largest, by environment steps.

    Where episodes end early, seeds are tested after other steps each, and there are no rows.
    """
    curves = {program: _test_returns(rows.get(program, [])) for program in PROGRAMS}
    lines = [f"| steps | {' | '.join(PROGRAMS)} |", "| --- |" + " --- |" * len(PROGRAMS)]
    seeds = max(map(len, rows.values()))
    tested = [at for curve in curves.values() for at, found in curve.items() if len(found) == seeds]
    for steps in sorted(set(tested)):
        cells = (_cell(curve.get(steps, [])) for curve in curves.values())
        lines.append(f"| {steps:,} | {' | '.join(cells)} |")
    return lines


def _cell(returns: list[float]) -> str:
    return f"{np.mean(returns):.0f} ({min(returns):.0f} to {max(returns):.0f})" if returns else "–"


def _test_returns(rows: Sequence[Row]) -> dict[int, list[float]]:
    """Mean test return of every seed, by environment steps."""
    curve: dict[int, list[float]] = {}
    for row in rows:
        for evaluation in row["evaluations"]:
            curve.setdefault(evaluation["steps"], []).append(float(np.mean(evaluation["returns"])))
    return curve


def _curve(row: Row) -> Curve:
    found = row["evaluations"]
    return np.array([test["steps"] for test in found]), np.array([np.mean(test["returns"]) for test in found])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--only", choices=PROGRAMS, help="only one of the two")
    parser.add_argument("--every", type=int, default=5, help="updates between evaluations")
    parser.add_argument("--test-episodes", type=int, default=5, help="episodes of an evaluation")
    parser.add_argument("--threads", type=int, default=1, help="cores for the process, and threads of torch")
    parser.add_argument("--out", type=Path, default=Path("build/sac"), help="folder of the results")
    parser.add_argument("--plot", type=Path, help="draw the test returns into this PNG")
    return parser.parse_args()


if __name__ == "__main__":
    main()
