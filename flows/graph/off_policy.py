"""Off-policy runs: an update learns from transitions of all iterations so far, so the store is the replay buffer.

What a stage reads of earlier iterations is a Span: `sample_transitions` reads the lengths of episodes, `update` the
batches that hold the rows drawn. What of them is in memory already is not read again, which changes no bit.
"""
