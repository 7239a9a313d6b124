"""`policy`: writes a trained policy to a file."""

from pathlib import Path
from typing import TYPE_CHECKING

from metaloom.flows.arguments import checked
from metaloom.flows.operations import late
from metaloom.flows.operations.options import Iteration, LearnerArgument, Trust, agree
from metaloom.flows.runs import RunAt
from metaloom.storage import open_run

if TYPE_CHECKING:
    from metaloom.flows.trained.policy import TrainedPolicy


@checked
def policy(
    run: LearnerArgument, iteration: Iteration = None, *, out: Path | str, trust: Trust = False
) -> "TrainedPolicy":
    """Write a trained policy to a file.

    The file can be used without the run. RUN@N is the policy after N updates, with which iteration N starts; RUN is the
    newest policy.

    Example: `metaloom policy first@2 --out first.safetensors`

    Args:
        run: Run that trained the policy.
        iteration: Number of updates of the policy, counted from the end if negative; the newest policy if None.
        out: New file: .safetensors for `metaloom.load_policy`; .onnx or .pt2 (torch.export) for other programs.
        trust: Allow importing the modules that the run's settings name, now and later.
    """
    at = RunAt.of(run, iteration, learner=True)
    agree(at.path, trust)
    found = late.policy_of(open_run(at.path), -1 if at.iteration is None else at.iteration)
    found.save(Path(out))
    return found
