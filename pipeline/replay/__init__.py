"""The replay buffer: stored transitions by their row numbers, which of them a task may draw, and minibatches of them.

Knows nothing of the store. Whoever uses it tells how many real steps the episodes of a round have, and reads a round's
batch when it is asked to:

    tasks = TaskIndex()                                              # index.py: which rows every task has
    tasks.append(iteration, task_ids, lengths, in_context=False)
    view = tasks.as_of(iteration)                                    # to draw row numbers from

    buffer = ReplayBuffer(columns, cache_bytes=..., max_rows=...)    # buffer.py, of rows as its columns pack them
    buffer.append(lengths)
    for minibatch in buffer.minibatches(drawn, read):                # read(n) returns the n-th round's episodes
        ...

Both number the rows alike, so they need not grow at the same time. `flows/graph/replay.py` connects them with a run.
"""
