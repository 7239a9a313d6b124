"""Stored runs: arrays, lineage, commit, tables.

Opening a run imports neither torch nor a simulator:

    run = storage.open_run("runs/x")
    run.episodes().to_pandas().groupby(["iteration", "step"])["return"].mean()
    run[12].rollouts(0).rewards
"""

from metaloom.storage.errors import (
    BudgetReached,
    DamagedRun,
    DigestMismatch,
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
    StageThinned,
    StorageFailed,
    StoreError,
)
from metaloom.storage.format.digests import digest, output_digest
from metaloom.storage.format.paths import check_run_name, run_path
from metaloom.storage.format.records import StageRecord, read_record
from metaloom.storage.format.refs import Span, StageRef
from metaloom.storage.format.stages import StageTable, StoredStage
from metaloom.storage.iteration import Iteration
from metaloom.storage.keep.fork import Fork, fork_run
from metaloom.storage.keep.quarantine import Quarantined, put_in_quarantine, read_quarantine
from metaloom.storage.keep.thinning import Retention, Thinned
from metaloom.storage.read.verify import Damage, verify_run
from metaloom.storage.remote.listing import find_runs
from metaloom.storage.remote.places import folder_of, location, url_of
from metaloom.storage.run import Run, open_run, run_exists
from metaloom.storage.write.creation import check_new_run, create_run
from metaloom.storage.write.writer import RunWriter, open_writer

__all__ = [
    "BudgetReached",
    "Damage",
    "DamagedRun",
    "DigestMismatch",
    "FencedOut",
    "Fork",
    "IncompatibleFormat",
    "InvalidRunName",
    "Iteration",
    "LayoutMismatch",
    "NotARun",
    "Quarantined",
    "Retention",
    "Run",
    "RunExists",
    "RunLocked",
    "RunNotFound",
    "RunWriter",
    "Span",
    "StageExists",
    "StageMissing",
    "StageRecord",
    "StageRef",
    "StageTable",
    "StageThinned",
    "StorageFailed",
    "StoreError",
    "StoredStage",
    "Thinned",
    "check_new_run",
    "check_run_name",
    "create_run",
    "digest",
    "find_runs",
    "folder_of",
    "fork_run",
    "location",
    "open_run",
    "open_writer",
    "output_digest",
    "put_in_quarantine",
    "read_quarantine",
    "read_record",
    "run_exists",
    "run_path",
    "url_of",
    "verify_run",
]
