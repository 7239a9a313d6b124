"""Statistics for groups of runs: scores, confidence intervals and comparisons of groups.

The measures follow Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice",
arXiv:2108.13264, section 4. Whole runs are resampled, because one learner's scores on several tasks are not
independent, unlike those of the separately trained agents in that paper.
"""
