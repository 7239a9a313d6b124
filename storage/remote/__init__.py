"""Runs under object storage: the truth is a log of conditional puts there, and a folder here is a cache of it.

Everything else in `storage` reads and writes the cache folder, which has the form of any run. What makes an output
exist is its entry in the log; see `session.py` here for how it gets there, `log.py` for reading.
"""
