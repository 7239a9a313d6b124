"""Settings of RL2, Duan et al. 2016, arXiv:1611.02779, with PPO; also Wang et al. 2016, arXiv:1611.05763."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from metaloom.pipeline.algorithms.contract import RunSettings
from metaloom.pipeline.algorithms.trials.settings import TrialSettings
from metaloom.pipeline.nn.spec import BUILT_IN_NETWORKS
from metaloom.pipeline.policies.config import ActorKind


class RL2(TrialSettings):
    """A recurrent policy that adapts to a task by what it remembers of its episodes there, trained by PPO."""

    graph: ClassVar[str] = "on_policy"
    learner: ClassVar[str] = "metaloom.pipeline.algorithms.rl2.learner:RL2Learner"
    actor: ClassVar[ActorKind] = "recurrent"

    name: Literal["rl2"] = "rl2"

    initial_output_scale: float = Field(default=1.0, ge=0)
    """Multiplies the policy's output layer at the start. Near 0, what is remembered hardly learns at first, since the
    gradient reaches it through this layer."""

    @property
    def run_defaults(self) -> Mapping[str, Any]:
        """One GRU, no baseline; see AlgorithmSettings."""
        return {
            "policy": {"network": "gru", "hidden_sizes": (128,)},
            "baseline": {"name": "zero"},
            "processing": {"gae_lambda": 0.95},
            "episodes_per_task": self.episodes_per_trial,
        }

    def own_problems(self, run: RunSettings) -> Iterator[str]:
        """See TrialSettings."""
        if run.policy.name is not None:
            yield f"policy.name is {run.policy.name} but rl2 needs a memory; set policy.network to a class of your own"
        if run.policy.network in BUILT_IN_NETWORKS:
            yield (
                f"policy.network is {run.policy.network}, which has no memory; required gru, lstm, or module:Class of "
                "a network with a memory for rl2"
            )
