"""Runs in object storage: a log of conditional puts is authoritative, and a local folder is its cache.

The rest of `storage` reads and writes the cache folder, which looks like any other run. An output exists if it is in
the log; `session.py` writes the log, and `log.py` reads it.
"""
