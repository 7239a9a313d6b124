"""The storage format: references, layout, codecs, digests, records, paths."""
