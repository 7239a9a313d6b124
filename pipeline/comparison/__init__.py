"""Statistics of groups of runs: how high a group's scores are, how sure that is, and which group is higher.

The measures follow Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice",
arXiv:2108.13264, section 4. What is resampled is whole runs: the scores that one learner has on several tasks are not
independent of each other, as the separately trained agents of that paper are.
"""
