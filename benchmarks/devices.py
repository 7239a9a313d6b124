"""Wall seconds of the stages of an iteration, on the CPU and on a GPU.

    python benchmarks/devices.py [--recipes promp-half-cheetah-dir] [--hidden 64 256] [--set KEY=VALUE ...]

Each recipe is trained in turns on each device, with networks of two layers of each size. Printed are medians of the
recorded seconds over the iterations after the first; the two devices use different kernels (`--set algorithm.kernel`).
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

import metaloom
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.device import DeviceName


def main() -> None:
    """Print a row of medians for each recipe, network size and device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["promp-half-cheetah-dir", "maml-trpo-half-cheetah-dir"])
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256], help="units of each hidden layer")
    parser.add_argument("--devices", nargs="+", default=["cpu", "cuda"])
    parser.add_argument("--iterations", type=int, default=4, help="the first is not counted")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings")
    parser.add_argument("--workers", type=int, default=2, help="Dask workers that sample")
    arguments = parser.parse_args()
    for recipe in arguments.recipes:
        for hidden in arguments.hidden:
            for device in arguments.devices:
                seconds = _seconds(recipe, hidden, device, arguments)
                parts = "  ".join(f"{stage} {value:.3f} s" for stage, value in seconds.items())
                print(f"{recipe:28} {hidden:5} units  {device:5} {parts}", flush=True)


def _seconds(recipe: str, hidden: int, device: DeviceName, arguments: argparse.Namespace) -> Mapping[str, float]:
    """Train a run and return the median seconds of each stage."""
    with tempfile.TemporaryDirectory() as folder:
        run = metaloom.train(
            recipe,
            Path(folder) / "run",
            iterations=arguments.iterations,
            overrides=arguments.set,
            device=device,
            backend=Backend(workers=arguments.workers),
            policy={"hidden_sizes": [hidden] if "rl2" in recipe else [hidden, hidden]},
            progress=False,
        )
        lineage = run.lineage().to_pandas()
    later = lineage[lineage["iteration"] > 0]
    return {str(stage): float(seconds) for stage, seconds in later.groupby("stage")["seconds"].median().items()}


if __name__ == "__main__":
    main()
