"""Acting in environments: samplers, blocks of episodes, faults, watches."""
