"""docs/lab's Dockerfile, built and trained in, and its composition, whose parts are killed."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from containers import ROOT, Engine, built_image
from prefect_server import FINAL_STATES, wait_for

from metaloom import storage
from metaloom.flows.commands.train import train
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.settings import settings_file
from metaloom.pipeline.config.run import RunConfig

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(3600)]

LAB = ROOT / "docs" / "lab"
POSTGRES = "postgres:15-bookworm"
# Which CPU code path adds up is this machine's choice there as well.
ARITHMETIC = ("OPENBLAS_CORETYPE", "ATEN_CPU_CAPABILITY", "NPY_DISABLE_CPU_FEATURES")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with built_image() as engine:
        yield engine


def test_the_image_trains_as_its_own_user_with_the_digests_of_this_machine(
    engine, tmp_path, tiny_config: Callable[..., RunConfig], digests
):
    config = tiny_config()
    (tmp_path / "mine.toml").write_text(settings_file(config, "toml"))
    assert engine("run", "--rm", engine.image, "id", "--user").strip() == "10001"
    given = [word for name in ARITHMETIC for word in ("--env", name)]
    made = engine("create", *given, engine.image, "metaloom", "train", "mine.toml", "--run", "first").strip()
    try:
        engine("cp", tmp_path / "mine.toml", f"{made}:/work/mine.toml")
        engine("start", "--attach", made)
        engine("cp", f"{made}:/runs/first", tmp_path / "first")
    finally:
        engine("rm", "--force", "--volumes", made)
    assert storage.verify_run(tmp_path / "first") == []
    alone = train(config, tmp_path / "alone", backend=Backend(workers=0))
    assert digests(tmp_path / "first") == digests(alone.path)


class Composition:
    """docs/lab/compose.yaml in a folder of its own, with two workers and no port of this machine."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.file = folder / "compose.yaml"
        found = yaml.safe_load((LAB / "compose.yaml").read_text())
        found["name"] = engine.image
        for name in ("serve", "scheduler", "worker"):
            found["services"][name] |= {"image": engine.image}
            del found["services"][name]["build"]
        del found["services"]["serve"]["ports"]
        found["services"]["serve"]["environment"] |= dict.fromkeys(ARITHMETIC)
        found["services"]["worker"]["environment"] |= dict.fromkeys(ARITHMETIC)
        self.file.write_text(yaml.safe_dump(found))
        (folder / ".env").write_text("LAB_PASSWORD=lab:secret\nDATABASE_PASSWORD=secret\n")
        subprocess.run([LAB / "tls.sh", folder / "tls"], check=True, capture_output=True)
        # Belongs to another user there than here.
        for path in (folder / "tls", *(folder / "tls").iterdir()):
            path.chmod(0o755)

    def __call__(self, *arguments: str | Path) -> str:
        return self.engine("compose", "--file", self.file, *arguments)

    def inside(self, *command: str) -> str:
        """Run what a user types in the container of the server."""
        return self("exec", "--no-TTY", "serve", *command)

    def kill(self, service: str, word: str) -> None:
        """Kill the processes of a container that have this word in their command."""
        command = ("exec", "--no-TTY", service, "python", "-c", KILL, word)
        done = subprocess.run(
            [self.engine.program, "compose", "--file", self.file, *command], capture_output=True, text=True
        )
        # What kills the one process that a container is there for ends with it.
        assert done.returncode in (0, 137), done.stdout + done.stderr

    def state(self) -> str:
        (found,) = json.loads(self.inside("prefect", "flow-run", "ls", "--output", "json"))
        return found["state"]["type"]

    def iterations(self) -> int:
        return int(self.inside("python", "-c", ITERATIONS))

    def require_progress(self) -> None:
        stored = self.iterations()
        wait_for(lambda: self.iterations() > stored, "it trains", seconds=300)


KILL = """
import os, pathlib, signal, sys
found = [int(folder.name) for folder in pathlib.Path("/proc").glob("[0-9]*")
         if sys.argv[1] in (folder / "cmdline").read_text().split(chr(0))]
found = sorted({*found} - {1, os.getpid()})
for pid in found:
    os.kill(pid, signal.SIGKILL)
sys.exit(not found)
"""

ITERATIONS = """
import pathlib
from metaloom import storage
run = pathlib.Path("/runs/first")
print(len(storage.open_run(run).iterations) if (run / "run.json").exists() else 0)
"""


@pytest.fixture
def composition(engine, tmp_path) -> Iterator[Composition]:
    if not engine.has("compose", "version"):
        pytest.skip(f"`{engine.program} compose` is not installed")
    if not engine.has("image", "inspect", POSTGRES):
        pytest.skip(f"the database's image is not here: {engine.program} pull {POSTGRES}")
    made = Composition(engine, tmp_path)
    try:
        made("up", "--detach", "--scale", "worker=2")
        yield made
    finally:
        made("down", "--volumes")


def test_a_composition_trains_on_though_its_parts_are_killed_and_its_server_started_anew(
    engine, composition, tmp_path, tiny_config: Callable[..., RunConfig], digests
):
    config = tiny_config(iterations=200)
    wait_for(lambda: "started!" in composition("logs", "serve"), "it serves", seconds=300)
    asked = {"config": config.model_dump(mode="json"), "run": "first", "scheduler": "tls://scheduler:8786"}
    composition.inside("prefect", "deployment", "run", "meta-train-custom", "--params", json.dumps(asked))
    killed = [
        ("scheduler", "scheduler"),
        ("worker", "worker"),
        ("serve", "metaloom.flows.prefect_app.server"),
        ("serve", "metaloom.flows.prefect_app.flow_process"),
    ]
    for service, word in killed:
        composition.require_progress()
        serving = composition("logs", "serve").count("started!")
        composition.kill(service, word)
        if word.endswith(".server"):  # which ends the container, and it is started again
            wait_for(lambda n=serving: composition("logs", "serve").count("started!") > n, "it serves", seconds=300)
    composition.require_progress()
    composition("restart", "serve")
    composition.require_progress()
    wait_for(lambda: composition.state() in FINAL_STATES, "the flow run ends", seconds=600)
    assert composition.state() == "COMPLETED"
    composition("cp", "serve:/runs/first", tmp_path / "first")
    assert storage.verify_run(tmp_path / "first") == []
    alone = train(config, tmp_path / "alone", backend=Backend(workers=0))
    assert digests(tmp_path / "first") == digests(alone.path)
