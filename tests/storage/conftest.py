"""Small batches of every kind, and small runs made of them."""

import gc
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metaloom import storage
from metaloom.pipeline.types import (
    EpisodeBatch,
    Evaluation,
    LearnerState,
    Minibatches,
    Params,
    Samples,
    TaskBatch,
    TaskParams,
    Update,
)
from metaloom.storage import RunWriter, Span, StageRef
from metaloom.storage.format.codec import Value
from metaloom.storage.format.stages import OFF_POLICY, ON_POLICY

Output = tuple[StageRef, Value, list[StageRef | Span]]
Outputs = list[Output]
BUCKET_RUNS = "s3://bucket/runs"
CREATION = {"config": {"seed": 1}, "config_digest": "abc", "environment": {"code": "none"}}


@dataclass
class Batches:
    """Random batches of one size; the same sequence of calls gives the same batches."""

    B: int = 3
    E: int = 2
    T: int = 5
    O: int = 4
    A: int = 2
    seed: int = 0
    rng: np.random.Generator = field(init=False)
    num_rows: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def tasks(self, ids: np.ndarray | None = None) -> TaskBatch:
        ids = np.full(self.B, -1) if ids is None else ids
        return TaskBatch(self.rng.random((self.B, 2)), ids, ("velocity", "mass"), ("m/s", "kg"))

    def episodes(self, lengths: np.ndarray | None = None) -> EpisodeBatch:
        shape = (self.B, self.E, self.T)
        lengths = self.rng.integers(1, self.T + 1, shape[:2]) if lengths is None else lengths
        real = np.arange(self.T) < lengths[..., None]
        terms = {name: self._floats(shape) * real for name in ("run", "control")}
        return EpisodeBatch(
            observations=self._floats((self.B, self.E, self.T + 1, self.O)),
            actions=self._floats((*shape, self.A)) * real[..., None],
            rewards=terms["run"] + terms["control"],
            terminated=lengths < self.T,
            truncated=lengths == self.T,
            lengths=lengths.astype(np.int32),
            behavior={"mean": self._floats((*shape, self.A)), "log_std": self._floats((self.B, self.A))},
            reward_terms=terms,
            initial_state=self.rng.random((self.B, self.E, 3)),
        )

    def samples(self, episodes: EpisodeBatch) -> Samples:
        mask = episodes.mask
        return Samples(*(self._floats(mask.shape) * mask for _ in range(3)), mask)

    def params(self) -> Params:
        return {"net.kernel": self._floats((self.O, self.A)), "net.bias": self._floats((self.A,))}

    def adapted(self) -> TaskParams:
        return TaskParams({name: np.stack([value] * self.B) for name, value in self.params().items()})

    def learner(self) -> LearnerState:
        moments = {f"mean.{name}": value for name, value in self.params().items()}
        extra = {"env_steps": np.array(7), "kl_coeff": np.array([0.5, 0.25])}
        return LearnerState(self.params(), {**moments, "count": np.array(3)}, extra)

    def update(self) -> Update:
        return Update(self.learner(), {"step_0.average_return": float(self.rng.random()), "loss": -1.5})

    def evaluation(self, adaptation_steps: int = 2) -> Evaluation:
        test, adaptation = (self.B, adaptation_steps + 1, 4), (self.B, adaptation_steps, self.E)
        tasks = self.tasks()
        outcomes = {
            f"{kind}_{name}": values
            for kind, shape in (("test", test), ("adaptation", adaptation))
            for name, values in (
                ("returns", self.rng.random(shape)),
                ("lengths", self.rng.integers(1, self.T + 1, shape, np.int32)),
                ("terminated", self.rng.random(shape) < 0.5),
            )
        }
        return Evaluation(tasks.params, tasks.ids, tasks.names, tasks.units, **outcomes)

    def iteration(self, i: int, rounds: int = 2) -> Outputs:
        """The outputs of an iteration with their inputs, in the order of the stages."""
        first = [(StageRef(0, "initialize"), Update(self.learner(), {}), [])] if i == 0 else []
        outputs: Outputs = [
            *first,
            (StageRef(i, "sample_tasks"), self.tasks(), []),
        ]
        for k in range(rounds):
            rollouts = StageRef(i, "collect_rollouts", k)
            episodes = self.episodes()
            outputs.append((rollouts, episodes, [ON_POLICY.learner_ref(i), StageRef(i, "sample_tasks")]))
            outputs.append((StageRef(i, "process_samples", k), self.samples(episodes), [rollouts]))
            if k < rounds - 1:
                outputs.append((StageRef(i, "adapt", k), self.adapted(), [StageRef(i, "process_samples", k)]))
        processed = [StageRef(i, "process_samples", k) for k in range(rounds)]
        outputs.append((StageRef(i, "meta_optimize"), self.update(), [ON_POLICY.learner_ref(i), *processed]))
        return outputs

    def fill(self) -> EpisodeBatch:
        """Episodes that the memory begins with; their behaviour is that of no policy."""
        return replace(self.off_policy_episodes(), behavior={})

    def off_policy_episodes(self) -> EpisodeBatch:
        """Episodes of a policy that acts by a belief; their rows are those that come next."""
        episodes = self.episodes()
        self.num_rows += episodes.num_steps
        mean = episodes.behavior["mean"]
        behavior = {"mean": mean, "log_stds": -mean, "latent": self._floats((self.B, self.E, self.T))}
        return replace(episodes, behavior=behavior)

    def minibatches(self, context: bool = True) -> Minibatches:
        """Rows of all episodes so far for two gradient steps of four; the other two were not made."""
        U, K, N, C = 4, 2, 6, 3
        rows, contexts = (self.rng.integers(0, self.num_rows, (U, K, n)) for n in (N, C))
        task_ids = self.rng.integers(0, self.B, (U, K))
        for empty in (rows, contexts, task_ids):
            empty[2:] = -1
        return Minibatches(rows, task_ids, contexts if context else None)

    def off_policy_iteration(self, i: int, rounds: int = 2) -> Outputs:
        """The outputs of an iteration that learns from stored transitions, in the order of the stages."""
        begin, fill = StageRef(0, "initialize"), StageRef(0, "fill_memory")
        learner, tasks, drawn = (
            OFF_POLICY.learner_ref(i),
            StageRef(i, "sample_tasks"),
            StageRef(i, "sample_transitions"),
        )
        outputs: Outputs = []
        if i == 0:
            outputs += [(begin, Update(self.learner(), {}), []), (fill, self.fill(), [begin])]
        outputs.append((tasks, self.tasks(self.rng.permutation(self.B)), []))
        for k in range(rounds):
            belief = [(StageRef(i, "adapt", k - 1))] if k else []
            collected = StageRef(i, "collect_rollouts", k)
            outputs.append((collected, self.off_policy_episodes(), [learner, tasks, *belief]))
            if k < rounds - 1:
                outputs.append((StageRef(i, "adapt", k), self.adapted(), [learner, collected]))
        collected = [StageRef(i, "collect_rollouts", k) for k in range(rounds)]
        all_rounds = Span(("fill_memory", "collect_rollouts"), 0, i)
        outputs.append((drawn, self.minibatches(), [Span(("sample_tasks",), 0, i), all_rounds]))
        outputs.append((StageRef(i, "update"), self.update(), [learner, *collected, drawn, all_rounds]))
        return outputs

    def _floats(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.rng.standard_normal(shape, np.float32)


def put_all(writer: RunWriter, outputs: Sequence[Output]) -> None:
    for ref, value, inputs in outputs:
        position = (ref.iteration, ref.step)
        writer.put(ref, value, inputs=inputs, seed_position=position, started=1.7e9, seconds=0.25)


@pytest.fixture
def batches() -> Batches:
    return Batches()


@pytest.fixture(scope="session")
def put() -> Callable[..., None]:
    """Puts outputs with their inputs into a writer."""
    return put_all


@pytest.fixture(scope="session")
def creation() -> dict[str, object]:
    """Arguments of `create_run` besides path and capacity."""
    return CREATION


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Makes a run of so many iterations and returns its folder."""

    def make(iterations: int = 2, name: str = "run", capacity: int | None = None, **sizes: int) -> Path:
        batches = Batches(**sizes)
        with storage.create_run(tmp_path / name, capacity=capacity or iterations, **CREATION) as writer:
            for i in range(iterations):
                put_all(writer, batches.iteration(i))
        return tmp_path / name

    return make


@pytest.fixture
def make_off_policy_run(tmp_path: Path) -> Callable[..., Path]:
    """Makes a run of so many iterations that learns from stored transitions, and returns its folder."""

    def make(iterations: int = 2, name: str = "run", capacity: int | None = None, **about: Any) -> Path:
        batches, capacity = Batches(), capacity or iterations
        with storage.create_run(tmp_path / name, capacity=capacity, stages=OFF_POLICY, **CREATION, **about) as writer:
            for i in range(iterations):
                put_all(writer, batches.off_policy_iteration(i))
        return tmp_path / name

    return make


@pytest.fixture(scope="session")
def run_digests() -> Callable[[Path], dict[StageRef, str]]:
    """Reads the digest of every output of a run."""

    def read(path: Path) -> dict[StageRef, str]:
        run = storage.open_run(path)
        return {ref: run.record(ref).digest for ref in run.refs()}

    return read


@pytest.fixture(scope="session")
def distinct() -> Callable[[Sequence[Path]], list[Path]]:
    """Drops each folder with the same files as the one before."""

    def chosen(folders: Sequence[Path]) -> list[Path]:
        files = [
            {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            for folder in folders
        ]
        return [folder for n, folder in enumerate(folders) if n == 0 or files[n] != files[n - 1]]

    return chosen


@pytest.fixture(scope="session")
def make_batches() -> type[Batches]:
    """The class of batches, for other sizes."""
    return Batches


# Of moto's server, its S3 alone: to find out which service a request is for takes it a third of its time.
S3_SERVER = """
import sys

from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

class Quiet(MotoRequestHandler):
    def log_request(self, *about):
        pass

app = create_backend_app("s3")
run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=True, request_handler=Quiet)
"""


@pytest.fixture(scope="module")
def server():
    """The address of an S3 server of our own, which no client has been asked about before."""
    import s3fs  # which takes a second, and few tests need

    s3fs.S3FileSystem.clear_instance_cache()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", S3_SERVER, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for_port(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        # Clients never close their sockets. Collected later, those would accuse whatever test runs then.
        s3fs.S3FileSystem.clear_instance_cache()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


@pytest.fixture
def credentials(server, monkeypatch, tmp_path):
    """Environment that tells every process of a test where the store is, with an empty cache."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server,
        "METALOOM_RUNS": BUCKET_RUNS,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("METALOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def new_clients():
    """No client of the other tests, nor one of this test for them: to make one takes a tenth of a second."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def bucket(credentials):
    """The bucket, emptied."""
    import s3fs

    fs = s3fs.S3FileSystem(use_listings_cache=False)
    if fs.exists("bucket"):
        fs.rm("bucket", recursive=True)
    fs.mkdir("bucket")
    return fs


@pytest.fixture
def other_machine(monkeypatch, tmp_path):
    """Go over to another machine: its cache is empty when it is first named."""
    return lambda name: monkeypatch.setenv("METALOOM_CACHE", str(tmp_path / name))


@pytest.fixture
def make_remote(bucket, batches, put):
    """Makes a run of some iterations of one round under a URL."""

    def make(name, iterations=1, capacity=4):
        with storage.create_run(f"{BUCKET_RUNS}/{name}", capacity=capacity, **CREATION) as writer:
            for i in range(iterations):
                put(writer, batches.iteration(i, rounds=1))
        return f"{BUCKET_RUNS}/{name}"

    return make


def _wait_for_port(port, seconds=60.0):
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
