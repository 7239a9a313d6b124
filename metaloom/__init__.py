"""Meta-reinforcement learning as a dataflow: every batch kept, every stage replayable bit for bit."""
