"""Which source a stored output was computed with: known by session, compared when it is computed again, shown."""

import importlib
import shutil
import sys
from hashlib import sha256
from pathlib import Path

import gymnasium
import pytest

import metaloom
from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.train import train
from metaloom.flows.graph.runner import Runner
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.run import build_config
from metaloom.pipeline.config.sources import plugin_sources
from metaloom.storage import StageRef
from metaloom.storage.format.files import read_sealed, render, sealed

MEASURE = """
from metaloom.pipeline.types import EpisodeBatch
from own_scale import SCALE

def longest(episodes: EpisodeBatch) -> dict[str, float]:
    return {"longest": float(episodes.lengths.max())}
"""
SCALES = ["SCALE = 1\n", "SCALE = 1  # a comment\n", "SCALE = 1  # another\n"]
DIGESTS = [sha256(text.encode()).hexdigest() for text in SCALES]


@pytest.fixture
def say(tmp_path, monkeypatch, capsys, caplog):
    """Runs a command and returns its output and its warnings, in a folder with a run of two iterations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("METALOOM_RUNS", "runs")
    Path("own_measure.py").write_text(MEASURE)
    Path("own_scale.py").write_text(SCALES[0])
    sizes = {"iterations": 2, "num_tasks": 2, "episodes_per_task": 2, "max_episode_steps": 4}
    config = {"env": "point-corner", "algorithm": "promp", "policy": {"hidden_sizes": [4]}, **sizes}
    train(build_config({**config, "metrics": ["own_measure:longest"]}), Path("runs/first"), backend=Backend(workers=0))

    def run(words, code=0):
        caplog.clear()
        assert cli.run(words.split()) == code
        return capsys.readouterr().out, [record.getMessage() for record in caplog.records]

    yield run
    for name in ("own_measure", "own_scale"):
        sys.modules.pop(name, None)


def edit(scale):
    """Change the module, and import it again as another process would."""
    Path("own_scale.py").write_text(scale)
    importlib.reload(sys.modules["own_scale"])


def changed(run, session, before, after):
    digests = f"had the SHA-256 {DIGESTS[before][:12]}..., now {DIGESTS[after][:12]}..."
    return f"runs/{run}, session {session}: the source of own_scale {digests}; results may differ"


def source(run, iteration):
    run = storage.open_run(Path("runs") / run)
    return run.environment_of(StageRef(iteration, "meta_optimize"))["plugins"]["own_scale"]


def test_each_session_remembers_its_sources_and_replay_compares_with_them(say):
    assert say("replay first")[1] == []
    edit(SCALES[1])
    assert say("resume first --iterations 3 --workers 0")[1] == [changed("first", 0, 0, 1)]
    assert say("resume first --iterations 4 --workers 0")[1] == []
    assert [source("first", i) for i in range(4)] == [DIGESTS[i] for i in (0, 0, 1, 1)]
    out, warnings = say("replay first")
    assert "all identical" in out
    assert warnings == [changed("first", 0, 0, 1)]
    assert say("replay first@3")[1] == say("optimize first@3 --set algorithm.clip_eps=0.1")[1] == []
    assert say("policy first@1 --out first.safetensors")[1] == [changed("first", 0, 0, 1)]
    assert say("policy first@3 --out third.safetensors")[1] == []
    edit(SCALES[2])
    assert say("replay first")[1] == [changed("first", n, *pair) for n, pair in ((2, (1, 2)), (0, (0, 2)), (1, (1, 2)))]
    assert storage.verify_run("runs/first") == []


def test_a_policy_is_loaded_with_the_code_that_is_imported_whatever_the_file_says_now(say, caplog):
    Path("own_scale.py").write_text(SCALES[1])
    metaloom.open_run("./runs/first").policy()
    assert not caplog.records
    importlib.reload(sys.modules["own_scale"])
    metaloom.open_run("./runs/first").policy()
    assert [record.getMessage() for record in caplog.records] == [changed("first", 0, 0, 1)]


def test_a_fork_says_what_changed_and_keeps_what_its_shared_iterations_were_computed_with(say):
    edit(SCALES[1])
    assert say("fork first@1 --run second")[1] == [changed("first", 0, 0, 1)]
    assert source("second", 0) == DIGESTS[0]
    assert say("resume second --workers 0")[1] == [changed("second", 0, 0, 1)]
    assert [source("second", i) for i in range(2)] == DIGESTS[:2]
    assert say("replay second@0")[1] == [changed("second", 0, 0, 1)]
    assert say("replay second@1")[1] == []
    assert say("fork second@2 --run third --set iterations=3")[1] == []
    shutil.rmtree("runs/second")
    say("resume third --workers 0")
    assert [source("third", i) for i in range(3)] == [DIGESTS[i] for i in (0, 1, 1)]


def test_show_tells_which_sessions_computed_with_something_else(say):
    assert "sessions that" not in say("show first")[0]
    edit(SCALES[1])
    say("resume first --iterations 3 --workers 0")
    say("resume first --iterations 4 --workers 0")
    out = say("show first")[0]
    (line,) = [line for line in out.splitlines() if "plugins.own_scale" in line]
    assert line.split()[0] == "1"
    assert line.split()[-2:] == [digest[:12] for digest in DIGESTS[:2]]


def test_a_session_of_an_earlier_version_computed_with_what_its_run_began_with(say):
    say("resume first --iterations 3 --workers 0")
    (file,) = Path("runs/first/_sessions").glob("000001-*/session.json")
    document = {name: value for name, value in read_sealed(file).items() if name != "environment"}
    file.write_bytes(render(sealed(document)))
    assert source("first", 2) == DIGESTS[0]
    for nonsense in (5, {"plugins": 5}, {"plugins": {"own_scale": 5}}):
        file.write_bytes(render(sealed(document | {"environment": nonsense, "versions": 3})))
        assert "all identical" in say("replay first@2")[0]
        say("show first")


def test_batches_of_a_plug_in_that_has_changed_since_are_thinned_only_on_request(say, capsys):
    edit(SCALES[1])
    for dry in ("", " --dry-run"):
        assert cli.run(f"thin first --keep-last 1{dry}".split()) == 2
        message = capsys.readouterr().err
        assert f"the source of own_scale had the SHA-256 {DIGESTS[0][:12]}..., now {DIGESTS[1][:12]}..." in message
        assert "1 iteration, starting at 0, could not be recomputed. Restore the original sources" in message
    assert storage.open_run("runs/first").thinned_iterations() == []
    warnings = say("resume first --iterations 4 --set retention.keep_last=1 --workers 0")[1]
    assert any("2 iterations computed with it, starting at 0, will not be thinned" in warning for warning in warnings)
    assert storage.open_run("runs/first").thinned_iterations() == [2]
    say("thin first --keep-every 2 --anyway")
    assert storage.open_run("runs/first").thinned_iterations() == [1, 2, 3]
    edit(SCALES[0])
    say("thin first --keep-last 0")  # as they were when iteration 0 was computed
    assert storage.open_run("runs/first").thinned_iterations() == [0, 1, 2, 3]
    assert storage.verify_run("runs/first") == []


def test_what_a_plug_in_brings_back_otherwise_is_refused_with_what_has_changed(say, capsys, monkeypatch):
    say("thin first --keep-last 1")
    whole, original = Path("own_measure.py").read_text(), Runner.run
    Path("own_measure.py").unlink()
    module = sys.modules.pop("own_measure")
    assert cli.run(["thin", "first", "--keep-last", "0"]) == 2
    assert "its settings can no longer be loaded" in capsys.readouterr().err
    Path("own_measure.py").write_text(whole)
    sys.modules["own_measure"] = module
    edit(SCALES[1])

    def otherwise(stages, ref, inputs):
        value = original(stages, ref, inputs)
        if ref == StageRef(0, "collect_rollouts"):
            value.rewards[0, 0, 0] += 1
        return value

    monkeypatch.setattr(Runner, "run", otherwise)
    assert cli.run(["replay", "first@0", "--materialise"]) == 1
    message = capsys.readouterr().err
    assert f"Changed since: the source of own_scale had the SHA-256 {DIGESTS[0][:12]}" in message
    assert "Versions: the same" not in message


REGISTERS = """
import gymnasium
from gymnasium.envs.classic_control import PendulumEnv

class Swing(PendulumEnv):
    pass

gymnasium.register("Swing{n}-v0", {how})
"""


@pytest.mark.parametrize("how", ["Swing", "lambda **options: Swing(**options)", "'swing1:Swing', kwargs={'g': 9.0}"])
def test_the_module_that_registers_a_gymnasium_id_is_a_source(how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for n in (1, 2):
        Path(f"swing{n}.py").write_text(REGISTERS.format(n=n, how=how if n == 2 else "Swing"))
    try:
        sources = plugin_sources(build_config({"env": "swing2:Swing2-v0", "algorithm": "ppo"}))
    finally:
        for n in (1, 2):
            sys.modules.pop(f"swing{n}", None)
            gymnasium.registry.pop(f"Swing{n}-v0", None)
    assert sources["swing2:Swing2-v0"] == sha256(Path("swing2.py").read_bytes()).hexdigest()


OPTIONAL = """
try:
    import own_extra
except ImportError:
    own_extra = None
"""


def test_a_helper_that_has_gone_or_come_is_a_change(say, capsys):
    Path("own_extra.py").write_text("")
    edit(f"{OPTIONAL}\n{SCALES[0]}")
    say("resume first --iterations 3 --workers 0")
    Path("own_extra.py").unlink()
    gone = "the source of own_extra is gone"
    assert any(gone in warning for warning in say("replay first@2")[1])
    assert any(gone in warning for warning in say("evaluate first@3 --num-tasks 2")[1])
    assert cli.run(["thin", "first", "--keep-last", "0"]) == 2
    assert gone in capsys.readouterr().err
    say("resume first --iterations 4 --workers 0")
    Path("own_extra.py").write_text("")
    assert say("replay first@3")[1] == ["runs/first, session 2: the source of own_extra is new; results may differ"]
