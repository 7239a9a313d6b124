"""Stored runs in other formats. Memory stays bounded by one iteration, and a folder appears whole or not at all."""

from metaloom.storage.export.histories import export_histories
from metaloom.storage.export.parquet import export_parquet
from metaloom.storage.export.target import Export, ExportExists, export_folder

__all__ = ["Export", "ExportExists", "export_folder", "export_histories", "export_parquet"]
