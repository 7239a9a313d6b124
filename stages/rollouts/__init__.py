"""Rollouts: samplers, blocks of episodes, faults and progress observers."""
