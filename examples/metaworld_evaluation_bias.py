"""metaworld.evaluation reports a policy that fails in three of four goals as one that always succeeds.

Needs Metaloom's environment after `make metaworld`: Metaloom has the package run with newer MuJoCo, and has no other
part in this. It evaluates one agent in two ways, on four test goals of reach-v3, as
`make_ml_envs_test` gives them: the scripted expert acts in the environment of one goal, in the others the arm stands
still.

`metaworld.evaluation.evaluation` counts the first episodes of a class to *finish*. It ends an episode upon success, so
the expert finishes within a hundred steps, over and over, while an episode that fails takes 500: none of those is
ever counted. The other way counts the same number of episodes for every goal, to its end.
"""

import numpy as np
from metaworld import make_ml_envs_test
from metaworld.evaluation import evaluation
from metaworld.policies import SawyerReachV3Policy

from metaloom.pipeline.envs.metaworld.package import official_classes

NUM_GOALS, NUM_EPISODES, SOLVED = 4, 3, 0


class OneGoalExpert:
    """Solves the goal of environment SOLVED, and no other."""

    def __init__(self, envs):
        self.goals = np.stack(envs.get_attr("_target_pos"))
        self.expert = SawyerReachV3Policy()

    def eval_action(self, observations):
        """[n, 4], of observations [n, 39] whose goal is hidden: so it is told to the expert, which alone moves."""
        actions = np.zeros((len(observations), 4), np.float32)
        shown = observations[SOLVED].copy()
        shown[-3:] = self.goals[SOLVED]
        actions[SOLVED] = self.expert.get_action(shown)
        return actions

    def reset(self, env_mask):
        """Nothing is remembered from one episode to the next."""


def every_goal_alike(agent, envs):
    """Success rate over NUM_EPISODES whole episodes for each goal."""
    envs.call("toggle_terminate_on_success", False)
    successes = []
    for _ in range(NUM_EPISODES):
        observations, _ = envs.reset()
        succeeded, truncated = np.zeros(envs.num_envs, bool), np.zeros(envs.num_envs, bool)
        while not truncated.any():  # all in the same step, the 500th
            observations, _, _, truncated, infos = envs.step(agent.eval_action(observations))
            told = infos["final_info"] if truncated.any() else infos
            succeeded |= told["success"] == 1
        successes.append(succeeded)
    return np.mean(successes)


def main():
    official_classes()  # replaces the package's writing of welds, whose size newer MuJoCo has changed
    envs = make_ml_envs_test("reach-v3", seed=1, meta_batch_size=NUM_GOALS, total_tasks_per_cls=NUM_GOALS)
    envs.call("toggle_sample_tasks_on_reset", False)  # as metalearning_evaluation does
    envs.call("sample_tasks")
    agent = OneGoalExpert(envs)
    official, _, _, _ = evaluation(agent, envs, NUM_EPISODES)
    unbiased = every_goal_alike(agent, envs)
    envs.close()
    print(f"the agent solves 1 of {NUM_GOALS} goals, every time")
    print(f"metaworld.evaluation.evaluation: success rate {official:.2f}")
    print(f"{NUM_EPISODES} whole episodes per goal:        success rate {unbiased:.2f}")


if __name__ == "__main__":
    main()
