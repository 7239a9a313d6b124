"""Train environments that other people's packages bring: the same digests here, on workers, resumed and replayed.

    pip install "gymnasium[box2d]" panda-gym gym-pusht carl-bench minigrid highway-env popgym
    python benchmarks/field.py BipedalWalker-v3 gym_pusht:gym_pusht/PushT-v0 my_envs:Panda

Each is trained by A2C for two iterations of two episodes. A row says what the rehearsal decided, how many witness
episodes came out again bit for bit, and whether each of the other ways gave equal digests.
"""

import argparse
import tempfile
import time
from importlib.metadata import packages_distributions, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from metaloom import storage
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import resume, train
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.envs.config import REPRODUCED, EnvConfig
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.envs.facts import class_path
from metaloom.pipeline.schema import ConfigError

ITERATIONS = 2
SETTINGS = {
    "algorithm": {"name": "a2c"},
    "policy": {"hidden_sizes": [8]},
    "iterations": ITERATIONS,
    "num_tasks": 2,
    "episodes_per_task": 2,
    "min_steps": None,
    "max_episode_steps": 100,
}
HERE = Backend(workers=0)


def digests(path: Path) -> dict[str, str]:
    """Digest of every output of a run."""
    run = storage.open_run(path)
    return {str(ref): run.record(ref).digest for ref in run.refs()}


def trained(name: str, folder: Path) -> list[str]:
    """Train on an environment in every way; returns a row of the table."""
    config = build_config({**SETTINGS, "env": name})
    began = time.perf_counter()
    train(config, folder / "here", backend=HERE)
    seconds = time.perf_counter() - began
    train(config, folder / "workers", backend=Backend(workers=2))
    train(config.model_copy(update={"iterations": 1}), folder / "resumed", backend=HERE)
    resume(folder / "resumed", iterations=ITERATIONS, backend=HERE)
    run, expected = storage.open_run(folder / "here"), digests(folder / "here")
    witness = sum(run[i].metrics()[REPRODUCED] for i in range(ITERATIONS))
    return [
        name,
        package_of(config.env),
        run.config["env"]["copies"],
        f"{witness:.0f} of {ITERATIONS}",
        *("yes" if digests(folder / other) == expected else "NO" for other in ("workers", "resumed")),
        "yes" if all(outcome.identical for outcome in replay(folder / "here")) else "NO",
        f"{seconds:.1f}",
    ]


def package_of(env: EnvConfig) -> str:
    """The installed package of an environment's class, with its version."""
    module = class_path(env).partition(".")[0].partition(":")[0]
    found = packages_distributions().get(module)
    return f"{found[0]} {version(found[0])}" if found else module


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", nargs="+", help="names as for --set env=NAME")
    table = Table("environment", "package", "copies", "witness", "workers", "resumed", "replayed", "seconds", box=None)
    for name in parser.parse_args().env:
        with tempfile.TemporaryDirectory(prefix="metaloom-field-") as folder:
            try:
                table.add_row(*trained(name, Path(folder)))
            except (ConfigError, EnvError) as refusal:
                table.add_row(name, str(refusal))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
