"""The steps of a meta-training iteration, one per file. They are pure: no disk, no clock, no globals."""
