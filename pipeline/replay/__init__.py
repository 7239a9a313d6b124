"""Replay buffer: transitions by row index, the rows of each task, and minibatches.

The package does not depend on the store. The caller appends the episode lengths of each rollout batch, and reads
episodes on request:

    tasks = TaskIndex()                                              # index.py: the rows of each task
    tasks.append(iteration, task_ids, lengths, in_context=False)
    view = tasks.as_of(iteration)                                    # to draw row indices from

    buffer = ReplayBuffer(columns, cache_bytes=..., max_rows=...)    # buffer.py: transitions, packed into rows
    buffer.append(lengths)
    for minibatch in buffer.minibatches(drawn, read):                # read(n) returns the episodes of batch n
        ...

Both use the same row indices, so they may grow at different times. `stages/memory/replay.py` connects them with a run.
"""
