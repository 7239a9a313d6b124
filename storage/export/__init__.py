"""Stored runs in other formats. Memory stays bounded by one iteration, and a folder appears whole or not at all."""

from storage.export.histories import export_histories
from storage.export.parquet import export_parquet
from storage.export.target import Export, ExportExists, export_folder

__all__ = ["Export", "ExportExists", "export_folder", "export_histories", "export_parquet"]
