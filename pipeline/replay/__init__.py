"""The replay buffer: which stored transitions there are, and how minibatches are drawn from them."""
