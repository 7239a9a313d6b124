"""What stored bytes mean: references, layout, codecs, digests, records, paths."""
