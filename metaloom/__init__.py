"""Meta-reinforcement learning as a dataflow: every batch kept, every stage replayable bit for bit.

    import metaloom

    run = metaloom.open_run("runs/first")
    run.episodes().to_pandas().groupby(["iteration", "step"])["return"].mean()

    config = metaloom.build_config(metaloom.load_settings("promp-point-corner") | {"iterations": 20})
    metaloom.train(config, Path("runs/second"), backend=metaloom.Backend(workers=0))

Names are imported when they are first used: opening a run needs no torch, and `import metaloom` nothing at all.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metaloom.flows.commands.baselines import fitted_baselines as fitted_baselines
    from metaloom.flows.commands.evaluate import evaluate as evaluate
    from metaloom.flows.commands.train import resume as resume
    from metaloom.flows.commands.train import train as train
    from metaloom.flows.recipes import RECIPES as RECIPES
    from metaloom.flows.recipes import load_settings as load_settings
    from metaloom.flows.rollouts.workers import Backend as Backend
    from metaloom.flows.trust import trust_run as trust_run
    from metaloom.pipeline.config.run import RunConfig as RunConfig
    from metaloom.pipeline.config.run import build_config as build_config
    from metaloom.storage import Run as Run
    from metaloom.storage import open_run as open_run

__version__ = "0.1.0"

_PLACES = {
    "RECIPES": "flows.recipes",
    "Backend": "flows.rollouts.workers",
    "Run": "storage",
    "RunConfig": "pipeline.config.run",
    "build_config": "pipeline.config.run",
    "evaluate": "flows.commands.evaluate",
    "fitted_baselines": "flows.commands.baselines",
    "load_settings": "flows.recipes",
    "open_run": "storage",
    "resume": "flows.commands.train",
    "train": "flows.commands.train",
    "trust_run": "flows.trust",
}


if not TYPE_CHECKING:  # else any name would pass for one of ours

    def __getattr__(name: str) -> object:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_PLACES)}")
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_PLACES]
