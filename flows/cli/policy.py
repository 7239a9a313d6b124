"""`metaloom policy`."""

from pathlib import Path

from metaloom.flows.cli.options import LearnerArgument, Trust, agree
from metaloom.flows.cli.output import console


def policy(run: LearnerArgument, *, out: Path, trust: Trust = False) -> int:
    """Write a trained policy to a file.

    The file can be used without the run.

    The policy of RUN@ITERATION is the one that this iteration starts from, after as many updates; of RUN, the newest.

    Example: `metaloom policy first@2 --out first.safetensors`

    Args:
        out: A new file: .safetensors for `metaloom.load_policy`; .onnx, or .pt2 of torch.export, for other programs.
    """
    # torch takes seconds to import.
    from metaloom.flows.runs import RunAt
    from metaloom.flows.trained.of_run import policy_of
    from metaloom.storage import open_run

    at = RunAt.parse(run, learner=True)
    agree(at.path, trust)
    found = policy_of(open_run(at.path), -1 if at.iteration is None else at.iteration)
    found.save(out)
    console().print(f"{found!r}  {out}", markup=False)
    return 0
