"""Operations on stored runs: forks, thinning, unpacking, quarantine, repair and removal."""
