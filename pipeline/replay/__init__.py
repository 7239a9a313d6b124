"""Replay buffer, independent of the store: an index of each task's rows, and a cache from which minibatches are drawn.

TaskIndex and ReplayBuffer number transitions by the same row indices, so they may grow at different times.
`stages/memory/replay.py` connects them with a run.
"""
