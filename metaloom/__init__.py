"""Meta-reinforcement learning as a dataflow: every batch kept, every stage replayable bit for bit.

    import metaloom

    run = metaloom.open_run("first")
    run.episodes().to_pandas().groupby(["iteration", "step"])["return"].mean()

    second = metaloom.train("promp-point-corner", "second", iterations=20)
    policy = second.policy()

Names are imported on first use, so `import metaloom` is fast and opening a run needs no torch.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metaloom.flows.commands.optimize import fitted_baselines as fitted_baselines
    from metaloom.flows.opened import FinishedIteration as FinishedIteration
    from metaloom.flows.opened import Run as Run
    from metaloom.flows.opened import Runs as Runs
    from metaloom.flows.opened import open_run as open_run
    from metaloom.flows.opened import open_runs as open_runs
    from metaloom.flows.operations import reference as reference
    from metaloom.flows.operations.cancel import cancel as cancel
    from metaloom.flows.operations.compare import compare as compare
    from metaloom.flows.operations.diff import diff as diff
    from metaloom.flows.operations.doctor import doctor as doctor
    from metaloom.flows.operations.du import du as du
    from metaloom.flows.operations.evaluate import evaluate as evaluate
    from metaloom.flows.operations.export import export as export
    from metaloom.flows.operations.fork import fork as fork
    from metaloom.flows.operations.graph import graph as graph
    from metaloom.flows.operations.logs import logs as logs
    from metaloom.flows.operations.ls import ls as ls
    from metaloom.flows.operations.optimize import optimize as optimize
    from metaloom.flows.operations.pack import pack as pack
    from metaloom.flows.operations.policy import policy as policy
    from metaloom.flows.operations.recipes import recipes as recipes
    from metaloom.flows.operations.replay import materialise as materialise
    from metaloom.flows.operations.replay import replay as replay
    from metaloom.flows.operations.report import report as report
    from metaloom.flows.operations.rm import rm as rm
    from metaloom.flows.operations.show import show as show
    from metaloom.flows.operations.sweep import sweep as sweep
    from metaloom.flows.operations.thin import thin as thin
    from metaloom.flows.operations.train import iterate as iterate
    from metaloom.flows.operations.train import resume as resume
    from metaloom.flows.operations.train import train as train
    from metaloom.flows.operations.verify import verify as verify
    from metaloom.flows.operations.video import video as video
    from metaloom.flows.operations.view import view as view
    from metaloom.flows.operations.watch import watch as watch
    from metaloom.flows.prefect_app.operation import serve as serve
    from metaloom.flows.recipes import load_settings as load_settings
    from metaloom.flows.rollouts.backend import Backend as Backend
    from metaloom.flows.trained.policy import TrainedPolicy as TrainedPolicy
    from metaloom.flows.trained.policy import load_policy as load_policy
    from metaloom.flows.trust import trust_run as trust_run
    from metaloom.pipeline.config.run import RunConfig as RunConfig
    from metaloom.pipeline.config.run import build_config as build_config

__version__ = "0.1.0"


def _names() -> "dict[str, Callable[[], object]]":
    from metaloom.flows.operations import INSTALLED, operations, resolve
    from metaloom.pipeline.lazy import lazy_names

    found: dict[str, Callable[[], object]] = {
        name: partial(resolve, ":".join(place)) for name, place in lazy_names(__name__).items()
    }
    for name, operation in operations().items():
        if operation.group == INSTALLED:
            found[name.replace("-", "_")] = partial(getattr, operation, "function")
    return found | {"reference": partial(import_module, f"{__name__}.flows.operations.reference")}


if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if (names := _names()).get(name) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(names)}")
        return names[name]()


def __dir__() -> list[str]:
    return [*globals(), *_names()]
