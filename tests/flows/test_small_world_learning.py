"""ProMP learns in the small worlds with discrete actions, seed by seed."""

import numpy as np
import pytest

import metaloom
from metaloom.flows.commands.train import train
from metaloom.flows.recipes import new_config
from metaloom.flows.rollouts.workers import Backend

pytestmark = [pytest.mark.learning, pytest.mark.slow]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_promp_adapts_to_a_random_process_by_one_step(seed, tmp_path):
    """Nothing can be known of a process before it is seen: 1 per step; what is earned more is earned by adapting."""
    train(
        new_config("promp-tabular-mdp", ["iterations=30", f"seed={seed}"]), tmp_path / "run", backend=Backend(workers=0)
    )
    metrics = metaloom.open_run(tmp_path / "run").metrics().to_pandas()
    before, after = (metrics[f"step_{k}.average_return"].to_numpy()[-10:].mean() for k in (0, 1))
    # 80,000 steps of variance 2 and 400 processes, whose mean rewards differ with a deviation of about 1.5.
    assert before == pytest.approx(10, abs=0.6)
    assert after - before > 2
    assert np.isfinite(metrics["loss_after"]).all()
