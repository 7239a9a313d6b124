"""Views of stored runs: tables, charts, reports, progress."""
