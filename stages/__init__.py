"""One step of a meta-training iteration per file: batches in, a batch out, no disk, no clock, no globals."""
