"""Lazy imports of readers for tables and datasets, which opening a run does not need; see `pipeline/lazy.py`."""

# pyright: reportUnusedImport=false
from typing import TYPE_CHECKING

from metaloom.pipeline.lazy import lazily

if TYPE_CHECKING:
    from metaloom.storage.read.datasets import to_xarray
    from metaloom.storage.read.frames import lineage, read_entries, read_episodes, read_metrics, read_tables, scan_steps
    from metaloom.storage.read.transitions import minibatch_table, read_transitions
else:
    __getattr__ = lazily(__name__)
