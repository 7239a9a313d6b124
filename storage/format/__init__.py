"""Meaning of stored bytes: references, layout, codecs, digests, records, paths."""
