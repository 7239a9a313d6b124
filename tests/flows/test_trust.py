"""Runs that somebody else made: what their settings name is imported only if the user says so, whatever the command."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from forging import forge
from viewing import Viewer, visit

import metaloom
from metaloom import storage
from metaloom.flows import cli, trust
from metaloom.flows.commands.train import train
from metaloom.flows.prefect_app import deployments
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.viewer import pages
from metaloom.flows.views import charts
from metaloom.pipeline.config.run import build_config
from metaloom.storage import StageRef

SERIAL = Backend(workers=0)
PAGE = Path(__file__).parents[2] / "docs" / "trust.md"
TINY = {
    "env": "point-corner", "algorithm": "promp", "policy": {"hidden_sizes": [4]},
    "iterations": 2, "num_tasks": 2, "episodes_per_task": 2, "max_episode_steps": 4,
}  # fmt: skip

EVIL = """
from pathlib import Path
Path(__file__).with_name("IMPORTED").touch()
"""

INERT = 0, 1
"""The command works, and imports nothing; 1 where it says that something differs."""
REFUSED = (2,)
ASKED = 0, 2
"""The command wants a terminal to ask on, or has no use for such a run, and imports nothing."""

USES = {
    "train": [(INERT, "train promp-point-corner --run warm --workers 0 --set init_from=forged@1 --set iterations=1 "
                      "--set num_tasks=2 --set episodes_per_task=2 --set policy.hidden_sizes=[4]")],
    "resume": [(REFUSED, "resume forged"), (REFUSED, "resume forged --iterations 3 --workers 0"),
               (REFUSED, "resume forged --repair --take-over --set retention.keep_last=1")],
    "replay": [(REFUSED, "replay forged"), (REFUSED, "replay forged@0 --stage adapt --workers 1"),
               (REFUSED, "replay forged@0 --stage adapt --pdb"), (REFUSED, "replay forged@0 --quarantine"),
               (REFUSED, "replay forged@0 --materialise")],
    "optimize": [(REFUSED, "optimize forged@0"), (REFUSED, "optimize forged@0 --grid algorithm.clip_eps=0.1,0.2")],
    "evaluate": [(REFUSED, "evaluate forged"), (REFUSED, "evaluate forged --tasks tasks.json --workers 0")],
    "fork": [(REFUSED, "fork forged@1 --run mine"), (REFUSED, "fork forged@1 --run mine --set env=point-corner")],
    "thin": [(INERT, "thin forged --keep-last 1 --dry-run")],
    "pack": [(INERT, "pack forged"), (INERT, "pack forged --json")],
    "diff": [(INERT, "diff forged forged"), (INERT, "diff forged trained")],
    "ls": [(INERT, "ls"), (INERT, "ls --json")],
    "show": [(INERT, "show forged"), (INERT, "show forged --json"), (INERT, "show forged@0"),
             (REFUSED, "show forged@0 --stage process_samples")],
    "watch": [(INERT, "watch forged"), (INERT, "watch forged --json")],
    "cancel": [(INERT, "cancel forged")],
    "logs": [(INERT, "logs forged"), (INERT, "logs forged --level debug --follow --json")],
    "du": [(INERT, "du"), (INERT, "du forged --json")],
    "rm": [(ASKED, "rm forged")],
    "verify": [(INERT, "verify forged")],
    "report": [(INERT, "report forged"), (INERT, "report forged --static --figures figures"),
               (REFUSED, "report forged --video")],
    "video": [(REFUSED, "video forged@0 --out film.png"), (REFUSED, "video forged --best --out film.gif")],
    "view": [(INERT, "view")],
    "export": [(INERT, "export forged --to parquet --out exported"), (INERT, "export forged --to delta --out lake")],
    "policy": [(REFUSED, "policy forged --out policy.safetensors"), (REFUSED, "policy forged@1 --out policy.onnx")],
    "compare": [(INERT, "compare forged")],
    "reference": [(INERT, "reference ls"), (ASKED, "reference add forged --to references")],
    "sweep": [],  # tests/flows/test_sweep.py has what its own file may name
    "recipes": [],
    "graph": [(REFUSED, "graph forged"), (REFUSED, "graph forged --set env=point-corner")],
    "serve": [],
    "doctor": [],
}  # fmt: skip
"""By command: every way in which it reads a stored run, and what comes of it."""


def put(section, field, value):
    return lambda document, name: document["config"][section].update({field: value(name)})


PLACES = {
    "env": put("env", "name", lambda name: name),
    "gymnasium id": put("env", "name", lambda name: f"{name}-v0"),
    "algorithm": lambda document, name: document["config"].update(algorithm={"name": name}),
    "policy": put("policy", "name", lambda name: name),
    "network": put("policy", "network", lambda name: name),
    "metric": lambda document, name: document["config"].update(metrics=[name]),
    "baseline": lambda document, name: document["config"].update(baseline={"name": name}),
    "return baseline": put("processing", "return_baseline", lambda name: {"name": name}),
    "warm start": lambda document, name: document["config"].update(init_from=f"{name}//bucket/run"),
    "ancestor": lambda document, name: document["ancestors"][0]["config"]["env"].update(name=name),
}


READ_AT_ONCE = ("env", "gymnasium id", "algorithm", "return baseline", "ancestor")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of built-in parts, and a fork of it."""
    folder = tmp_path_factory.mktemp("trained")
    train(build_config(TINY), folder / "trained", backend=SERIAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METALOOM_RUNS", str(folder))
        assert cli.run(["fork", "trained@1", "--run", "forked"]) == 0
        assert cli.run(["resume", "forked", "--workers", "0"]) == 0
    return folder


@pytest.fixture(autouse=True)
def user(tmp_path, monkeypatch):
    """A user who trusts nothing yet, in a folder with modules."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("METALOOM_RUNS", str(tmp_path / "work" / "runs"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(trust, "_trusted_here", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    # Instead of waiting for a browser, ask what one would.
    tokens, gate = [], pages.token_gate
    monkeypatch.setattr(pages, "token_gate", lambda app, token: tokens.append(token) or gate(app, token))
    monkeypatch.setattr(pages, "run_server", lambda app, listening: visit(app, tokens[-1]))
    yield tmp_path
    for name in ("evil_module", "own_measure"):
        sys.modules.pop(name, None)


def test_every_command_says_how_it_uses_stored_runs():
    assert {*USES} == {*cli.COMMANDS}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["evil_module:Evil", "os:system"])
def test_no_command_imports_or_calls_what_a_foreign_run_names(place, name, user, runs, capsys, monkeypatch):
    # Figures are made, and not drawn: that takes most of the time, and reads nothing more.
    monkeypatch.setattr(charts, "rendered", lambda figure, kind, dpi=100: b"")
    shutil.copytree(runs / "trained", "runs/trained")
    shutil.copytree(runs / ("forked" if place == "ancestor" else "trained"), "runs/forged")
    Path("evil_module.py").write_text(EVIL)
    Path("tasks.json").write_text("[[0.5, 0.5]]")

    def change(document):
        document["config"]["env"]["options"] = {"command": "touch CALLED"}
        PLACES[place](document, name)

    forge(Path("runs/forged"), change)
    about = {"env": {"name": name, "options": {"command": "touch CALLED"}}, "episode": 0, "seed": 1}
    storage.put_in_quarantine(
        Path("runs/forged"), StageRef(0, "collect_rollouts"), message="\x1b[2Jgone", about=about, arrays={}
    )
    said = {
        "time": "\x1b[2J",
        "level": "error",
        "message": "\x1b[2Jgone",
        "stage": "\x1b[2J",
        "iteration": 0,
        "step": 0,
    }
    Path("runs/forged/_operator").mkdir(exist_ok=True)
    Path("runs/forged/_operator/log.jsonl").write_text(f"{json.dumps(said)}\n[]\n" + '{"torn')
    # Commands that read no settings are tried with what is imported where settings are read, and with an environment.
    tried = (INERT, ASKED, REFUSED) if name == "evil_module:Evil" and place in READ_AT_ONCE else (REFUSED,)
    for codes, words in (use for uses in USES.values() for use in uses if use[0] in tried):
        code, said = cli.run(words.split()), capsys.readouterr()
        assert code in codes, (words, said)
        assert "\x1b" not in said.out + said.err
        if codes is REFUSED:
            assert len(said.err.splitlines()) == 1, (words, said.err)
            module = name.partition(":")[0]
            where = "an installed package" if module == "os" else f"in {Path('evil_module.py').resolve()}"
            assert all(part in said.err for part in ("runs/forged: ", name, f"{module} ({where})", "--trust"))
        assert not Path("IMPORTED").exists(), words
        assert not Path("CALLED").exists(), words
    assert "evil_module" not in sys.modules
    assert not (user / "config/metaloom/trusted").exists()


@pytest.mark.slow
def test_a_film_on_the_page_asks_for_trust_as_the_command_does(runs):
    shutil.copytree(runs / "trained", "runs/forged")
    Path("evil_module.py").write_text(EVIL)
    forge(Path("runs/forged"), lambda document: PLACES["env"](document, "evil_module:Evil"))
    page = Viewer(Path("runs").absolute())
    answer = page.api("run", "forged", "film", 0, "collect_rollouts", 0, task=0, episode=0)
    assert answer.status_code == 422
    assert "you have not trusted" in answer.json()["problem"]
    assert not Path("IMPORTED").exists()


@pytest.mark.parametrize("words", ["diff forged trained", "replay forged", "graph forged"])
def test_a_step_limit_that_is_left_out_is_not_asked_of_a_foreign_module(words, runs, capsys):
    shutil.copytree(runs / "trained", "runs/trained")
    shutil.copytree(runs / "trained", "runs/forged")
    Path("evil_module.py").write_text(EVIL)

    def change(document):
        PLACES["gymnasium id"](document, "evil_module:Evil")
        del document["config"]["max_episode_steps"]

    forge(Path("runs/forged"), change)
    assert cli.run(words.split()) in (1, 2), capsys.readouterr()
    assert not Path("IMPORTED").exists()


@pytest.mark.parametrize("kind", ["env", "algorithm", "policy", "network", "metric", "baseline"])
def test_what_is_trusted_is_called_only_if_it_is_of_the_right_kind(kind, runs, capsys):
    shutil.copytree(runs / "trained", "runs/forged")

    def change(document):
        PLACES[kind](document, "os:system")
        if kind == "network":  # it has sizes of its own
            del document["config"]["policy"]["hidden_sizes"]

    forge(Path("runs/forged"), change)
    assert cli.run(["replay", "forged", "--trust"]) == 2
    assert "'os:system'" in capsys.readouterr().err


MEASURE = """
from metaloom.pipeline.types import EpisodeBatch

def longest(episodes: EpisodeBatch) -> dict[str, float]:
    return {"longest": float(episodes.lengths.max())}
"""


@pytest.fixture
def own(user):
    """A run of the user's, whose metric is in a module of the working folder; and back to a new process."""
    del user
    Path("own_measure.py").write_text(MEASURE)
    train(build_config({**TINY, "metrics": ["own_measure:longest"]}), Path("runs/own"), backend=SERIAL)
    trust._trusted_here.clear()


def says(words, capsys, code=0):
    assert cli.run(words.split()) == code, capsys.readouterr()
    said = capsys.readouterr()
    return said.out + said.err


@pytest.mark.usefixtures("own")
def test_what_the_user_trained_forked_and_resumed_is_trusted_without_a_word(capsys):
    assert "all identical" in says("replay own --workers 1 --stage collect_rollouts", capsys)
    says("fork own@1 --run second --set algorithm.clip_eps=0.1", capsys)
    trust._trusted_here.clear()
    says("resume second --workers 0", capsys)
    says("evaluate second --workers 0", capsys)
    says("optimize second@1 --set algorithm.clip_eps=0.2", capsys)
    says("graph second", capsys)


@pytest.mark.usefixtures("own")
def test_trust_is_given_once_and_for_one_run_alone(monkeypatch, user, capsys):
    shutil.copytree("runs/own", "runs/other")
    forge(Path("runs/other"), lambda document: document.update(id="other"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(user / "another user"))
    assert "you have not trusted" in says("replay own@0", capsys, 2)
    says("replay own@0 --trust", capsys)
    trust._trusted_here.clear()
    says("replay own@0", capsys)
    assert "you have not trusted" in says("replay other@0", capsys, 2)


@pytest.mark.usefixtures("own")
def test_a_policy_in_a_file_is_no_way_around_it(monkeypatch, user, capsys):
    says("policy own --out mine.safetensors", capsys)
    trust._trusted_here.clear()
    assert metaloom.load_policy("mine.safetensors").num_tasks == 1
    monkeypatch.setenv("XDG_CONFIG_HOME", str(user / "another user"))
    with pytest.raises(trust.UntrustedRun, match=r"mine\.safetensors: its settings name own_measure:longest"):
        metaloom.load_policy("mine.safetensors")
    assert metaloom.load_policy("mine.safetensors", trust=True).num_tasks == 1
    trust._trusted_here.clear()
    assert metaloom.load_policy("mine.safetensors").num_tasks == 1


@pytest.mark.usefixtures("own")
def test_a_link_or_a_copy_is_the_run_it_leads_to(capsys):
    Path("runs/link").symlink_to("own")
    shutil.copytree("runs/own", "elsewhere/own")
    for path in ("link", "elsewhere/own"):
        says(f"replay {path}@0", capsys)


@pytest.mark.usefixtures("own")
def test_what_is_changed_after_trust_was_given_is_not_trusted(capsys):
    forge(Path("runs/own"), lambda document: document["config"].update(seed=2))
    assert "you have not trusted" in says("replay own@0", capsys, 2)


def test_a_run_elsewhere_that_a_foreign_run_starts_from_is_opened_only_if_that_is_trusted(runs, user, capsys):
    shutil.copytree(runs / "trained", "runs/forged")
    shutil.copytree(runs / "trained", user / "private" / "trained")
    shutil.copytree(runs / "trained", "runs/beside")
    elsewhere, digest = user / "private" / "trained", "0" * 64

    def start(path):
        warm = {"run": str(path), "updates": 1, "digest": digest}
        forge(Path("runs/forged"), lambda document: document["config"].update(init_from=warm))

    start(elsewhere)
    for words in ("replay forged", "resume forged --iterations 3 --workers 0", "fork forged@1 --run mine"):
        assert f"forged: its init_from names {elsewhere}, which is outside its runs folder" in says(words, capsys, 2)
    assert "has the digest" in says("replay forged --trust", capsys, 2)  # the run was opened
    start(Path("runs/beside").resolve())  # as a run of earlier versions has it, which needs no word
    assert "has the digest" in says("replay forged", capsys, 2)


def test_the_page_says_of_every_command_how_it_uses_stored_runs():
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(("| import", "| compute"))]
    inert, refused = ({*re.findall(r"`([a-z]+)", row.split("|")[2])} for row in rows)
    for command, uses in USES.items():
        asks = any(kind is REFUSED for kind, _ in uses)
        assert not uses or command in (refused if asks else inert), command


@pytest.mark.usefixtures("own")
def test_a_module_of_the_same_name_in_another_folder_is_not_the_trusted_one(monkeypatch, user, capsys):
    (user / "evil").mkdir()
    (user / "evil" / "own_measure.py").write_text(EVIL)
    sys.modules.pop("own_measure")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(user / "work")])
    monkeypatch.chdir(user / "evil")
    line = says("replay own@0", capsys, 2)
    assert f"you have trusted a different path for own_measure (in {user / 'evil' / 'own_measure.py'})" in line
    assert not Path("IMPORTED").exists()


@pytest.mark.usefixtures("own")
def test_a_module_that_was_not_there_when_trust_was_given_is_not_trusted(user, capsys):
    shutil.rmtree(user / "config/metaloom/trusted")
    trust._trusted_here.clear()
    own = Path("own_measure.py").rename("elsewhere.py")
    sys.modules.pop("own_measure")
    says("replay own@0 --trust", capsys, 2)
    own.rename("own_measure.py")
    Path("own_measure.py").write_text(EVIL)
    for _ in range(2):  # by what this process was told, and by what is remembered
        line = says("replay own@0", capsys, 2)
        assert f"you have not trusted own_measure (in {Path('own_measure.py').resolve()})" in line
        trust._trusted_here.clear()
    assert not Path("IMPORTED").exists()


@pytest.mark.usefixtures("own")
def test_somebody_elses_word_is_not_the_users(monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert "you have not trusted" in says("replay own@0", capsys, 2)


def test_whom_a_user_trusts_is_kept_where_nobody_else_can_look(user):
    for places in ({"own": "/one/place"}, {"own": "/another"}):
        trust.remember("of-settings", "runs/own", places)
        assert trust.remembered("of-settings") == places
    folder = user / "config" / "metaloom" / "trusted"
    assert folder.stat().st_mode & 0o777 == 0o700
    (file,) = folder.iterdir()
    assert json.loads(file.read_text()) == {"settings": "runs/own", "modules": {"own": "/another"}}


@pytest.mark.usefixtures("own")
def test_a_configuration_folder_that_cannot_be_written_is_told_and_stops_nothing(monkeypatch, user, capsys, caplog):
    (user / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(user / "file"))
    says("replay own@0 --stage adapt --trust", capsys)
    assert "cannot record that you trust it" in caplog.text


@pytest.mark.usefixtures("own")
def test_a_flow_run_trusts_what_its_own_parameters_name(monkeypatch, user):
    run = storage.open_run("runs/own")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(user / "another machine"))
    for names in ([], ["own_other:longest"]):
        with pytest.raises(trust.UntrustedRun, match="own_measure:longest"):
            deployments.stored_config(run, {"metrics": names}, trust=False)
    parameters = {"metrics": ["own_measure:longest"]}
    assert deployments.stored_config(run, parameters, trust=False).metrics == ("own_measure:longest",)


@pytest.mark.usefixtures("own")
def test_flows_of_stored_runs_take_the_word_of_who_starts_them(monkeypatch, user):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(user / "another machine"))
    monkeypatch.setattr(deployments, "publish_replay", lambda folder, outcomes: None)
    with pytest.raises(trust.UntrustedRun):
        deployments.replay.fn("own", iteration=0, stage="adapt")
    assert deployments.replay.fn("own", iteration=0, stage="adapt", trust=True).is_completed()


def test_names_are_told_in_their_order_whatever_the_order_of_settings():
    config = {"metrics": [f"mine:{letter}" for letter in "fbeadc"]}
    names = [f"mine:{letter}" for letter in "abcdef"]
    assert trust.StoredSettings.of_policy("mine.safetensors", json.dumps(config)).names == names
    run = SimpleNamespace(info={"config": config, "ancestors": [{"config": {"env": "mine:Env"}}]})
    assert trust.names_of_run(run) == ["mine:Env", *names]
