"""Train environments that other people's packages bring: the same digests here, on workers, resumed and replayed.

    python benchmarks/field.py                          all PACKAGES, each installed into an environment of its own
    python benchmarks/field.py popgym carl              only these
    python benchmarks/field.py --env BipedalWalker-v3   an environment that is installed here

Each is trained for three iterations of two tasks and two episodes, by A2C. A row has the package with its version, what
the rehearsal decided, how many witness episodes came out again bit for bit, whether two workers, a resume after the
first iteration and a replay gave the same digests, whether a Parquet export read back gives the stored numbers, whether
a loop over gymnasium's own calls with the stored seed and actions gives the stored rows, and whether an episode can be
filmed. Where one of these fails, its column has the reason.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pyarrow.parquet as pq
from gymnasium.spaces import Box
from gymnasium.spaces.utils import flatten

from metaloom import storage
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import resume, train
from metaloom.flows.errors import UsageError
from metaloom.flows.exports import export
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.envs import REPRODUCED
from metaloom.pipeline.envs.config import EnvConfig, WrapperConfig
from metaloom.pipeline.envs.facts import class_path
from metaloom.pipeline.envs.wrappers import action_map
from metaloom.stages.rollouts.faults import RolloutPosition
from metaloom.storage import Run


class Package(NamedTuple):
    """A package to install.

    Attributes:
        requirement: Requirement that pip installs.
        env: settings of one of its environments.
        policy: settings of the policy.
        options: passed to pip.
    """

    requirement: str
    env: Mapping[str, Any]
    policy: Mapping[str, Any] = {"hidden_sizes": [8]}
    options: Sequence[str] = ()


_CNN = {"network": "cnn", "hidden_sizes": [8]}
_MINIGRID = [{"name": "FilterObservation", "options": {"filter_keys": ["direction", "image"]}}]
PACKAGES = {
    "box2d": Package("gymnasium[box2d]", {"name": "BipedalWalker-v3"}),
    "ale": Package("ale-py", {"name": "ale_py:ALE/Pong-v5"}, _CNN),
    "minigrid": Package("minigrid", {"name": "minigrid:MiniGrid-Empty-Random-6x6-v0", "wrappers": _MINIGRID}),
    # Of its environments, Fetch and Kitchen do not work with MuJoCo 4.
    "robotics": Package("gymnasium-robotics", {"name": "gymnasium_robotics:PointMaze_UMaze-v3"}),
    "highway": Package("highway-env", {"name": "highway_env:highway-fast-v0"}),
    "panda": Package("panda-gym", {"name": "panda_gym:PandaPushDense-v3"}),
    "flappy": Package("flappy-bird-gymnasium", {"name": "flappy_bird_gymnasium:FlappyBird-v0"}),
    "popgym": Package("popgym", {"name": "popgym:popgym-RepeatPreviousEasy-v0"}),
    "mo": Package(
        "mo-gymnasium",
        {
            "name": "mo_gymnasium:deep-sea-treasure-v0",
            "wrappers": ["mo_gymnasium.wrappers:LinearReward"],
        },
    ),
    # It does not work with MuJoCo 4.
    "shimmy": Package("shimmy[dm-control]", {"name": "shimmy:dm_control/cartpole-balance-v0"}, options=("mujoco<4",)),
    # It asks for gymnasium 0.29 and works with ours.
    "carl": Package(
        "carl-bench",
        {"name": "carl.envs:CARLPendulum"},
        options=("--no-deps", "ConfigSpace", "more-itertools", "pygame"),
    ),
    "anytrading": Package("gym-anytrading", {"name": "gym_anytrading:stocks-v0"}),
    "pusht": Package("gym-pusht", {"name": "gym_pusht:gym_pusht/PushT-v0"}),
    "pybullet": Package("pybullet", {"name": "pybullet_envs:AntBulletEnv-v0"}),
    # It asks for MuJoCo 3.3.0 and works with ours.
    "metaworld": Package(
        "metaworld==3.1.1",
        {"name": "metaworld:Meta-World/MT1", "options": {"env_name": "reach-v3"}},
        options=("--no-deps",),
    ),
}

ITERATIONS = 3
SETTINGS = {
    "algorithm": {"name": "a2c"},
    "iterations": ITERATIONS,
    "num_tasks": 2,
    "episodes_per_task": 2,
    "min_steps": None,
    "max_episode_steps": 50,
}
HERE = Backend(workers=0)
COLUMNS = (
    "environment", "package", "`env.copies`", "witness", "two workers", "resumed", "replayed", "export", "own loop",
    "film", "seconds",
)  # fmt: skip


def digests(path: Path) -> dict[str, str]:
    """Digest of every output of a run."""
    run = storage.open_run(path)
    return {str(ref): run.record(ref).digest for ref in run.refs()}


def trained(env: Mapping[str, Any], policy: Mapping[str, Any], folder: Path) -> list[str]:
    """Train on an environment in every way; returns a row of the table."""
    config = build_config({**SETTINGS, "env": env, "policy": policy})
    began = time.perf_counter()
    train(config, folder / "here", backend=HERE)
    seconds = time.perf_counter() - began
    run, expected = storage.open_run(folder / "here"), digests(folder / "here")

    def on_workers() -> bool:
        train(config, folder / "workers", backend=Backend(workers=2))
        return digests(folder / "workers") == expected

    def resumed() -> bool:
        train(config.model_copy(update={"iterations": 1}), folder / "resumed", backend=HERE)
        resume(folder / "resumed", iterations=ITERATIONS, backend=HERE)
        return digests(folder / "resumed") == expected

    return [
        f"`{config.env.name}`",
        package_of(config.env),
        run.config["env"]["copies"],
        f"{sum(run[i].metrics()[REPRODUCED] for i in range(ITERATIONS)):.0f} of {ITERATIONS}",
        answer(on_workers),
        answer(resumed),
        answer(lambda: all(outcome.identical for outcome in replay(run.path))),
        answer(lambda: reads_back(run, folder)),
        answer(lambda: plays_by_hand(run)),
        answer(lambda: films(run, folder)),
        f"{seconds:.1f}",
    ]


def answer(check: Callable[[], bool]) -> str:
    """Return what a check says, or why it cannot say it."""
    try:
        return "yes" if check() else "NO"
    except Exception as problem:
        return f"no: {reason(problem)}"


def reason(problem: Exception) -> str:
    """Return what was raised, on one short line."""
    kind = "" if isinstance(problem, ValueError) else f"{type(problem).__name__}: "
    return f"{kind}{problem}".splitlines()[0].removeprefix("metaloom: ")[:150]


def package_of(env: EnvConfig) -> str:
    """The installed package of an environment's module, or of its class, with its version."""
    module = (env.name if ":" in env.name else class_path(env)).partition(":")[0].partition(".")[0]
    found = packages_distributions().get(module)
    return f"{found[0]} {version(found[0])}" if found else module


def reads_back(run: Run, folder: Path) -> bool:
    """Compare a Parquet export with what is stored."""
    export(run, folder / "parquet", "parquet")
    for i in range(ITERATIONS):
        episodes = run[i].rollouts(0)
        table = pq.read_table(folder / "parquet" / "steps" / f"iteration={i}" / "stage=rollouts_0" / "steps.parquet")
        real = episodes.mask != 0
        rewards, seen = episodes.rewards[real], episodes.observations[:, :, :-1][real]
        if not np.array_equal(table["reward"].to_numpy(), rewards):
            return False
        if not np.array_equal(table["observation"].combine_chunks().flatten().to_numpy(), seen.ravel()):
            return False
    return True


def plays_by_hand(run: Run) -> bool:
    """Compare the episodes of the first iteration with those of a loop over gymnasium's own calls."""
    config = run.config["env"]
    episodes = run[0].rollouts(0)
    B, E = episodes.lengths.shape
    for b, e in np.ndindex(B, E):
        with closing(made_by_hand(config)) as env:
            space = env.observation_space
            taken = action_map(env.action_space, config["action_scale"])  # pyright: ignore[reportArgumentType]
            seed = RolloutPosition(run.config["seed"], 0, 0).reset_seed(b, e, config["seed_bits"])
            observation, _ = env.reset(seed=seed)
            for t in range(episodes.lengths[b, e] + 1):
                stored = episodes.observations[b, e, t]
                flat = observation if isinstance(space, Box) else flatten(space, observation)
                if not np.array_equal(np.asarray(flat).ravel().astype(stored.dtype), stored):
                    return False
                if t == episodes.lengths[b, e]:
                    break
                action = np.asarray(taken(episodes.actions[b, e, t])).astype(env.action_space.dtype)
                observation, reward, *_ = env.step(action if action.shape else action[()])
                if np.float32(reward) != episodes.rewards[b, e, t]:
                    return False
    return True


def made_by_hand(config: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """Make an environment of a run's settings without Metaloom."""
    module, _, name = config["name"].rpartition(":")
    found = getattr(importlib.import_module(module), name, None) if module else None
    if found is not None:
        env = found(**config["options"])
    else:
        env = gymnasium.make(config["name"], max_episode_steps=-1, disable_env_checker=True, **config["options"])
    for wrapper in config["wrappers"]:
        path = WrapperConfig.model_validate(wrapper).path.partition(":")
        env = getattr(importlib.import_module(path[0]), path[2])(env, **wrapper["options"])
    return env


def films(run: Run, folder: Path) -> bool:
    """Film an episode; in a process of its own, since what draws has to be chosen before MuJoCo is imported."""
    command = [sys.executable, "-m", "metaloom.flows.cli", "video", f"{run.path}@0", "--every", "10", "--out"]
    done = subprocess.run([*command, str(folder / "film.gif")], capture_output=True, text=True)
    if done.returncode:
        raise UsageError((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])
    return True


def row_of(env: Mapping[str, Any], policy: Mapping[str, Any]) -> list[str]:
    """Return a row of the table, or the reason why there is none."""
    with tempfile.TemporaryDirectory(prefix="metaloom-field-") as folder:
        try:
            return trained(env, policy, Path(folder))
        except Exception as problem:
            return [f"`{env['name']}`", reason(problem)]


def row_of_package(name: str, folder: Path) -> list[str]:
    """Install a package into an environment of its own, beside what is installed here, and return its row."""
    package, place = PACKAGES[name], folder / name
    python = place / "bin" / "python"
    if not (place / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
        library = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
        here = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (Path(library.decode().strip()) / "metaloom_base.pth").write_text(here)
        constraint = (
            place / "constraint.txt"
        )  # what a package asks for is not to hide the gymnasium that is trained with
        constraint.write_text(f"gymnasium=={version('gymnasium')}\n")
        command = [python, "-m", "pip", "install", "--quiet", "--constraint", str(constraint)]
        installed = subprocess.run([*command, *package.options, package.requirement], capture_output=True, text=True)
        if installed.returncode:
            reason = (installed.stderr.strip().splitlines() or ["pip failed"])[-1]
            return [f"`{package.env['name']}`", f"{package.requirement} cannot be installed: {reason[:200]}"]
        (place / "installed").touch()
    command = [python, __file__, "--settings", json.dumps([package.env, package.policy])]
    done = subprocess.run(command, env={**os.environ, "SDL_VIDEODRIVER": "dummy"}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return [f"`{package.env['name']}`", f"the process ended with status {done.returncode}"]
    return json.loads(done.stdout.splitlines()[-1])


def print_row(cells: Sequence[str]) -> None:
    """Print a row of a Markdown table, the last cell over the rest of them."""
    print("| " + " | ".join([*cells, *[""] * (len(COLUMNS) - len(cells))]) + " |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"of {', '.join(PACKAGES)}; all by default")
    parser.add_argument("--folder", type=Path, default=Path("build/field"), help="where packages are installed")
    parser.add_argument("--env", action="append", default=[], help="environment that is installed here, as --set env=")
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.settings:
        print("\n" + json.dumps(row_of(*json.loads(asked.settings))))
        return
    print_row(COLUMNS)
    print_row(["---"] * len(COLUMNS))
    for name in asked.env:
        print_row(row_of({"name": name}, {"hidden_sizes": [8]}))
    for name in asked.packages or ([] if asked.env else PACKAGES):
        print_row(row_of_package(name, asked.folder))


if __name__ == "__main__":
    main()
