"""How runs are kept: arrays, lineage, commit, tables.

Opening a run imports neither torch nor a simulator:

    run = storage.open_run("runs/x")
    run.episodes().to_pandas().groupby(["iteration", "step"])["return"].mean()
    run[12].rollouts(0).rewards
"""

from storage.digests import digest, output_digest
from storage.errors import (
    DamagedRun,
    FencedOut,
    IncompatibleFormat,
    InvalidRunName,
    LayoutMismatch,
    NotARun,
    RunExists,
    RunLocked,
    RunNotFound,
    StageExists,
    StageMissing,
    StorageFailed,
    StoreError,
)
from storage.iteration import Iteration
from storage.paths import check_run_name, run_path
from storage.quarantine import Quarantined, put_in_quarantine, read_quarantine
from storage.reader import Run, open_run
from storage.records import StageRecord, read_record
from storage.refs import STAGES, StageRef, learner_ref
from storage.verify import Damage, verify_run
from storage.writer import RunWriter, check_new_run, create_run, open_writer

__all__ = [
    "STAGES",
    "Damage",
    "DamagedRun",
    "FencedOut",
    "IncompatibleFormat",
    "InvalidRunName",
    "Iteration",
    "LayoutMismatch",
    "NotARun",
    "Quarantined",
    "Run",
    "RunExists",
    "RunLocked",
    "RunNotFound",
    "RunWriter",
    "StageExists",
    "StageMissing",
    "StageRecord",
    "StageRef",
    "StorageFailed",
    "StoreError",
    "check_new_run",
    "check_run_name",
    "create_run",
    "digest",
    "learner_ref",
    "open_run",
    "open_writer",
    "output_digest",
    "put_in_quarantine",
    "read_quarantine",
    "read_record",
    "run_path",
    "verify_run",
]
