"""Storage of runs: arrays, lineage, atomic commits and tables.

Opening a run imports neither torch nor a simulator:

    run = storage.open_run("runs/x")
    run.episodes().to_pandas().groupby(["iteration", "step"])["return"].mean()
    run[12].rollouts(0).rewards
"""

from metaloom.pipeline.dataflow.refs import Span as Span
from metaloom.pipeline.dataflow.refs import StageRef as StageRef
from metaloom.storage.errors import BudgetReached as BudgetReached
from metaloom.storage.errors import DamagedRun as DamagedRun
from metaloom.storage.errors import DigestMismatch as DigestMismatch
from metaloom.storage.errors import FencedOut as FencedOut
from metaloom.storage.errors import IncompatibleFormat as IncompatibleFormat
from metaloom.storage.errors import InvalidRunName as InvalidRunName
from metaloom.storage.errors import LayoutMismatch as LayoutMismatch
from metaloom.storage.errors import NotARun as NotARun
from metaloom.storage.errors import RunExists as RunExists
from metaloom.storage.errors import RunLocked as RunLocked
from metaloom.storage.errors import RunNotFound as RunNotFound
from metaloom.storage.errors import StageExists as StageExists
from metaloom.storage.errors import StageMissing as StageMissing
from metaloom.storage.errors import StageThinned as StageThinned
from metaloom.storage.errors import StorageFailed as StorageFailed
from metaloom.storage.errors import StoreError as StoreError
from metaloom.storage.format.codec import digest as digest
from metaloom.storage.format.codec import output_digest as output_digest
from metaloom.storage.format.places import argument as argument
from metaloom.storage.format.places import check_run_name as check_run_name
from metaloom.storage.format.places import folder_of as folder_of
from metaloom.storage.format.places import location as location
from metaloom.storage.format.places import run_path as run_path
from metaloom.storage.format.places import url_of as url_of
from metaloom.storage.format.records import StageRecord as StageRecord
from metaloom.storage.format.records import read_record as read_record
from metaloom.storage.format.stages import StageTable as StageTable
from metaloom.storage.format.stages import StoredStage as StoredStage
from metaloom.storage.format.thinning import Retention as Retention
from metaloom.storage.format.thinning import Thinned as Thinned
from metaloom.storage.keep.fork import Fork as Fork
from metaloom.storage.keep.fork import fork_run as fork_run
from metaloom.storage.keep.quarantine import Quarantined as Quarantined
from metaloom.storage.keep.quarantine import put_in_quarantine as put_in_quarantine
from metaloom.storage.keep.quarantine import read_quarantine as read_quarantine
from metaloom.storage.keep.removal import check_removable as check_removable
from metaloom.storage.keep.removal import finish_removals as finish_removals
from metaloom.storage.keep.removal import remove_run as remove_run
from metaloom.storage.keep.removal import unfinished_removals as unfinished_removals
from metaloom.storage.opening import create_run as create_run
from metaloom.storage.opening import open_writer as open_writer
from metaloom.storage.read.verify import Damage as Damage
from metaloom.storage.read.verify import verify_run as verify_run
from metaloom.storage.run import Iteration as Iteration
from metaloom.storage.run import Run as Run
from metaloom.storage.run import find_runs as find_runs
from metaloom.storage.run import open_run as open_run
from metaloom.storage.run import run_exists as run_exists
from metaloom.storage.write.creation import check_new_run as check_new_run
from metaloom.storage.write.holder import Writer as Writer
from metaloom.storage.write.holder import ask_to_stop as ask_to_stop
from metaloom.storage.write.holder import current_writer as current_writer
from metaloom.storage.write.holder import was_killed as was_killed
from metaloom.storage.write.holder import withdraw as withdraw
from metaloom.storage.writer import RunWriter as RunWriter
