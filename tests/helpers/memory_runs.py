"""Small runs of policies that remember, and what the tests of every kind of them ask."""

from metaloom import storage
from metaloom.flows.commands.fork import fork
from metaloom.flows.commands.replay import replay
from metaloom.flows.commands.train import resume, train
from metaloom.flows.recipes import RECIPES
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import build_config

SERIAL = Backend(workers=0)


def recipe_config(recipe, settings):
    """A recipe with other settings; what it does not set itself is as for any run."""
    before = RECIPES[recipe]()
    return build_config(override(before.model_dump(mode="json", include=before.model_fields_set), settings))


def trained_once(tmp_path_factory, config_of):
    """Return what gives the run of a name, trained in this process when it is first asked for."""
    found = {}

    def path_of(name):
        if name not in found:
            found[name] = tmp_path_factory.mktemp(name) / "run"
            train(config_of(name), found[name], backend=SERIAL)
        return found[name]

    return path_of


def require_replayed(path):
    """Require that a run is intact and that all its stages come out again bit for bit."""
    assert storage.verify_run(path) == []
    outcomes = list(replay(path))
    assert {outcome.ref.stage for outcome in outcomes} >= {"collect_rollouts", "process_samples", "meta_optimize"}
    assert all(outcome.identical for outcome in outcomes)


def require_forks(parent, folder, change, digests):
    """Require that a fork after one iteration goes on as its parent did, and with a change in its update alone."""
    for name, changes in (("same", ()), ("other", (change,))):
        fork(parent, 1, folder / name, changes)
        resume(folder / name, backend=SERIAL)
    same, other, before = digests(folder / "same"), digests(folder / "other"), digests(parent)
    assert same == before
    assert {ref for ref in before if other[ref] != before[ref]} == {"1.meta_optimize.0", "1.evaluate.0"}
