"""What algorithms have to earn on the dense corner, judged by the spread of the reference runs (docs/results.md).

Each trains with a seed that no reference has, at the settings of the references.
"""

import pytest

import metaloom
from metaloom.flows.commands.train import train
from metaloom.flows.recipes import new_config
from metaloom.flows.rollouts.workers import Backend

pytestmark = [pytest.mark.learning, pytest.mark.slow]

SIZES = ("env.options.reward=dense", "num_tasks=20", "episodes_per_task=10", "iterations=30")


def returns(recipe, seed, path):
    train(new_config(recipe, [*SIZES, f"seed={seed}"]), path, backend=Backend(workers=0))
    return metaloom.open_run(path).metrics().to_pandas()


@pytest.mark.parametrize(
    ("algorithm", "least"),
    # Iterations 20 to 29 of three references, of E-MAML and VPG-DICE of three runs like them, were worth:
    [
        ("promp", -260),  # -242 to -227
        ("maml-trpo", -155),  # -131 to -122
        ("e-maml", -155),  # -128 to -120
        ("maml-vpg", -281),  # -275 to -268
        ("dice-maml", -160),  # -142 to -131
        ("vpg-dice", -165),  # -145 to -133
    ],
)
def test_adaptation_by_one_step_is_worth_what_it_was(algorithm, least, tmp_path):
    metrics = returns(f"{algorithm}-point-corner", 6, tmp_path / "run")
    assert metrics["step_1.average_return"][20:].mean() > least
    assert metrics["step_0.average_return"][20:].mean() == pytest.approx(-287, abs=12)


def test_maml_ppo_rises_without_a_jump(tmp_path):
    """Of five references iterations 20 to 29 are worth -225 to -219, and no update went further than a KL of 0.019."""
    metrics = returns("maml-ppo-point-corner", 6, tmp_path / "run")
    assert metrics["step_1.average_return"][20:].mean() > -233
    assert metrics["step_0.average_return"][20:].mean() == pytest.approx(-290, abs=15)
    assert metrics["outer_kl"].max() < 0.05


def test_the_tuned_promp_learns_the_dense_corner(tmp_path):
    """Iterations 20 to 29 were worth -76 and -69 with seeds 1 and 2; with ProMP's authors' settings -227 at best."""
    metrics = returns("promp-point-corner-tuned", 6, tmp_path / "run")
    assert metrics["step_1.average_return"][20:].mean() > -95
    assert metrics["step_0.average_return"][20:].mean() == pytest.approx(-283, abs=10)
