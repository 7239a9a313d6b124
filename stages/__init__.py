"""Stages of a meta-training iteration, one per file. They are pure: they use no disk, clock or global state."""
