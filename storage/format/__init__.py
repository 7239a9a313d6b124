"""Storage format: layout, codecs, digests, records and paths."""
