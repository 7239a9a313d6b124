"""Plug-ins: names of Metaloom's own, module:Class of a user, entry points of installed packages."""

import hashlib
import importlib
import re
import sys
import types
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from metaloom.pipeline.algorithms import ALGORITHMS
from metaloom.pipeline.algorithms.contract import AlgorithmSettings
from metaloom.pipeline.baselines.config import BASELINES, BaselineConfig, BaselineSettings
from metaloom.pipeline.config import sources
from metaloom.pipeline.config.input import override
from metaloom.pipeline.config.run import RunConfig, build_config
from metaloom.pipeline.config.sources import changed_sources, plugin_sources
from metaloom.pipeline.envs import PLUGINS as ENVIRONMENTS
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.estimation.diagnostics import METRICS
from metaloom.pipeline.nn.spec import NETWORKS
from metaloom.pipeline.plugins import INSTALLED, load, path_of, place_of
from metaloom.pipeline.policies.config import POLICIES
from metaloom.pipeline.schema import ConfigError

OWN = '''
from typing import ClassVar, Literal
import numpy as np
from pydantic import Field
from metaloom.pipeline.algorithms.contract import AlgorithmSettings
from metaloom.pipeline.algorithms.maml.settings import ProMP
from metaloom.pipeline.baselines.config import BaselineConfig, BaselineSettings


class Still(AlgorithmSettings):
    graph: ClassVar[str] = "on_policy"
    learner: ClassVar[str] = "own_plugins:Learner"

    rate: float = Field(default=0.5, gt=0)

    def problems(self, run):
        if run.num_tasks > 100:
            yield "num_tasks is above 100; use fewer"


class Halved(BaselineSettings):
    share: float = 0.5

    def fit_predict(self, observations, targets, mask, *, seed=0, parallel=map):
        return self.share * np.asarray(targets, np.float64)


class Smoothed(ProMP):
    width: int = 9


class Smoother(Smoothed):
    pass


class Fixed(ProMP):
    name: Literal["promp"] = "promp"


class OwnConfig(BaselineConfig):
    pass


class Plain:
    """Not settings."""


class Learner:
    """Never built here."""


def outer():
    class Inner(AlgorithmSettings):
        pass

    return Inner
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_plugins.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("own_plugins", "own_pack")]:
        del sys.modules[name]


@pytest.fixture
def installed(own):
    """A package whose entry points bring an algorithm under several names, and a baseline."""
    info = own / "own-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[metaloom.algorithms]\n"
        + "".join(f"{name} = own_plugins:Still\n" for name in ("still", "idle", "calm", "quiet", "bare", "v1.2", "a(b"))
        + "[metaloom.baselines]\nhalved = own_plugins:Halved\n"
    )


def settings(**changes):
    return {"env": "point-corner", "algorithm": "own_plugins:Still", **changes}


@pytest.mark.usefixtures("own")
def test_an_algorithm_of_ones_own_is_configured_stored_and_found_again():
    config = build_config(override(settings(), ["algorithm.rate=2"]))
    assert (path_of(type(config.algorithm)), config.algorithm.model_dump()["rate"]) == ("own_plugins:Still", 2.0)
    stored = config.model_dump(mode="json")
    assert stored["algorithm"] == {"name": "own_plugins:Still", "kernel": "auto", "rate": 2.0}
    assert build_config(stored) == config
    assert build_config(stored).digest() == config.digest() != build_config(settings()).digest()


@pytest.mark.usefixtures("own")
def test_an_algorithm_given_as_an_object_is_stored_under_the_name_by_which_it_is_found():
    config = RunConfig(env=EnvConfig(name="point-corner"), algorithm=load("own_plugins:Still")(rate=3))
    assert config == build_config(override(settings(), ["algorithm.rate=3"]))


def test_the_page_names_the_entry_points_of_each_kind():
    page = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
    groups = dict(re.findall(r"^\| \[(\w+)\].* \| `(metaloom\.\w+)` \|$", page, re.MULTILINE))
    for plugins in (ALGORITHMS, NETWORKS, POLICIES, BASELINES, ENVIRONMENTS, METRICS):
        assert plugins.group == groups[plugins.kind]


@pytest.mark.usefixtures("installed")
def test_an_installed_package_brings_names_of_its_own():
    config = build_config(settings(algorithm="still", baseline={"name": "halved", "share": 0.1}))
    assert (config.algorithm.name, path_of(type(config.algorithm))) == ("still", "own_plugins:Still")
    assert config.baseline.build().fit_predict(0, [[[2.0]]], 1) == [[[0.2]]]
    assert build_config(config.model_dump(mode="json")) == config
    assert [*ALGORITHMS.builtin, "a(b", "bare", "calm", "idle", "quiet", "still", "v1.2"] == ALGORITHMS.names()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "valid"), [("v1.2", True), ("v1-2", False), ("a(b", True), ("m:A", True), (":A", False)]
)
def test_the_schema_allows_the_names_of_installed_packages_and_no_others(name, valid):
    schema, about = RunConfig.model_json_schema(), {"env": {"name": "point-corner"}, "algorithm": {"name": name}}
    assert Draft202012Validator(schema).is_valid(about) == valid


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["algorithm.rate=0"], r"^algorithm\.rate: .* greater than 0; got 0$"),
        (["algorithm.rat=1"], r"^algorithm\.rat: unknown key; got 1; did you mean rate\?$"),
        (["algorithm.rate=true"], r"^algorithm\.rate: expected a number, got True$"),
        (["num_tasks=101"], r"^config: num_tasks is above 100; use fewer$"),
        (["algorithm=own_plugins:Nothing"], r"^algorithm\.name: got 'own_plugins:Nothing': .* no attribute"),
        (["algorithm=nowhere:Still"], r"^algorithm\.name: got 'nowhere:Still': .*No module named 'nowhere'"),
        (
            ["algorithm=own_plugins:Plain"],
            r"is the class own_plugins:Plain; expected a subclass of metaloom\..*Settings",
        ),
        (["algorithm=own_plugins:Halved"], r"is the class own_plugins:Halved; expected a subclass"),
        (["algorithm=own_plugins:outer"], r"algorithm\.name: got 'own_plugins:outer', which is a function; expected"),
        (["algorithm=os:system"], r"algorithm\.name: got 'os:system', which is a builtin.*; expected a subclass"),
        (
            ["algorithm=prommp"],
            r"^algorithm\.name: got 'prommp'; did you mean promp\? Expected one of .*module:Class",
        ),
        (["baseline=linear_feture"], r"^baseline\.name: got 'linear_feture'; did you mean linear_feature\? Expected"),
        (["baseline=own_plugins:Still"], r"^baseline\.name: got .*; expected a subclass of .*BaselineSettings$"),
    ],
)
def test_what_is_no_plug_in_of_the_kind_is_refused_before_it_is_called(changes, message):
    with pytest.raises(ConfigError, match=message):
        build_config(override(settings(), changes))


class OfATest(AlgorithmSettings):
    """At the top level of a module that is imported by its path, not its name."""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import numpy\nnumpy.nothing",
            "raised AttributeError in .*broken_plugins.py, line 2: module .*; the module must",
        ),
        (
            "import nowhere",
            "raised ModuleNotFoundError in .*broken_plugins.py, line 1: No module named 'nowhere'; the",
        ),
        ("raise GeneratorExit", "raised GeneratorExit in .*broken_plugins.py, line 1"),
        ("def", r"raised SyntaxError: .*\(broken_plugins.py, line 1\); the module must be importable"),
        (
            "from metaloom.stages.graphs.on_policy import ON_POLICY\nON_POLICY.remove('adept')",
            "the module of .* cannot be imported: graph on_policy: there is no stage adept; .*; did you mean adapt.$",
        ),
    ],
)
def test_a_module_that_cannot_be_imported_is_not_taken_for_a_missing_one(text, words, tmp_path, monkeypatch):
    (tmp_path / "broken_plugins.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=words) as caught:
        load("broken_plugins:Class")
    assert "module:Class" not in str(caught.value)


@pytest.mark.usefixtures("own")
def test_an_object_that_no_other_process_would_find_is_refused(monkeypatch):
    inner = load("own_plugins:outer")()
    with pytest.raises(ConfigError, match=r"own_plugins:outer\.<locals>\.Inner' exists only in this process"):
        build_config(settings(algorithm=inner()))
    still = load("own_plugins:Still")
    monkeypatch.setattr(still, "__module__", "__main__")
    with pytest.raises(ConfigError, match="'__main__:Still' exists only in this process"):
        build_config(settings(algorithm=still()))


@pytest.mark.usefixtures("own")
def test_a_subclass_that_kept_a_built_in_name_would_be_replayed_as_another_and_is_refused():
    promp = load(ALGORITHMS.path("promp"))
    mine = type("Mine", (promp,), {"__module__": "own_plugins", "__annotations__": {"name": str}, "name": "promp"})
    with pytest.raises(ConfigError, match=r"is 'promp', which stands for .*:ProMP; remove the field name"):
        build_config(settings(algorithm=mine()))


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("name", ["own_plugins:Smoothed", "own_plugins:Smoother"])
def test_a_subclass_of_a_built_in_algorithm_is_found_under_its_own_name(name):
    config = build_config(settings(algorithm={"name": name, "width": 3}))
    assert (config.algorithm.name, config.algorithm.width) == (name, 3)
    assert type(config.algorithm) is load(name)
    assert build_config(config.model_dump(mode="json")) == config
    assert build_config(settings(algorithm=load(name)())).algorithm.name == name


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("section", "name", "cure"),
    [
        ("algorithm", "own_plugins:Fixed", "'promp'; use a class without the field `name`"),
        ("baseline", "own_plugins:OwnConfig", "'value_network'; use a class derived from .*:BaselineSettings"),
    ],
)
def test_a_subclass_that_fixes_the_names_of_built_in_settings_is_refused_with_the_cure(section, name, cure):
    with pytest.raises(ConfigError, match=f"^{section}.name: '{name}' is a class whose `name` must be .*{cure}"):
        build_config(settings(**{section: name}))


def test_built_in_settings_keep_their_place_in_files_and_schemas():
    schema = RunConfig.model_json_schema()
    names = {
        definition["properties"]["name"].get("const")
        for definition in schema["$defs"].values()
        if "name" in definition.get("properties", {})
    }
    assert ALGORITHMS.builtin.keys() <= names
    assert isinstance(build_config({"env": "point-corner", "algorithm": "promp"}).baseline, BaselineConfig)
    assert issubclass(BaselineConfig, BaselineSettings)


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_the_files_of_plug_ins_are_recorded_and_compared(own):
    config = build_config(settings(baseline="own_plugins:Halved"))
    paths = ["own_plugins:Halved", "own_plugins:Learner", "own_plugins:Still"]
    then = plugin_sources(config)
    assert then == dict.fromkeys(paths, sha256(OWN))
    assert changed_sources(plugin_sources(config), then) == []
    assert plugin_sources(build_config({"env": "point-corner", "algorithm": "promp"})) == {}
    (own / "own_plugins.py").write_text(OWN + "\n")
    with pytest.raises(ConfigError, match=r"own_plugins\.py has changed since this process imported own_plugins:"):
        plugin_sources(config)
    importlib.reload(sys.modules["own_plugins"])
    (line,) = changed_sources(plugin_sources(config), then)
    assert line.startswith(f"the source of {', '.join(paths)} had the SHA-256 {sha256(OWN)[:12]}..., now ")
    other = changed_sources({"a:A": "2", "b:B": "3"}, {"a:A": "1", "b:B": "1"})
    assert [words.split()[3] for words in other] == ["a:A", "b:B"]
    assert changed_sources({}, {"own_plugins:Still": "of a run that another plug-in goes on with"}) == []


def test_a_module_that_imports_a_plug_in_from_elsewhere_counts_with_it(own):
    texts = {"own_names": "from own_plugins import Halved as Other\nimport own_extra\n", "own_extra": "X = 1\n"}
    for name, text in texts.items():
        (own / f"{name}.py").write_text(text)
    expected = {"own_names:Other": OWN, **texts}
    assert sources.sources_of(["own_names:Other"]) == {name: sha256(text) for name, text in expected.items()}
    del sys.modules["own_names"]


@pytest.mark.usefixtures("own")
def test_modules_beside_a_plug_in_count_with_it_and_others_do_not(own, monkeypatch):
    files = {
        "own_rates.py": "import json, numpy, metaloom\nif False:\n    import own_rare\nRATE = 0.5\n",
        "own_rare.py": "",
        "own_tools/__init__.py": "from . import deep\n",
        "own_tools/deep.py": "from .deeper import X\n",
        "own_tools/deeper.py": "X = 1\n",
        "own_unused.py": "",
        "json.py": "raise AssertionError('the one that Python brings is imported')\n",
    }
    for name, text in files.items():
        (own / name).parent.mkdir(exist_ok=True)
        (own / name).write_text(text)
    text = "import own_rates\nimport own_tools.deep as deep\n" + OWN
    (own / "own_plugins.py").write_text(text)
    named = {"own_plugins:Learner": text, "own_plugins:Still": text}
    beside = {name.removesuffix(".py").replace("/", "."): text for name, text in files.items()}
    beside["own_tools"] = beside.pop("own_tools.__init__")
    for outside in ("own_unused", "json"):
        del beside[outside]
    assert plugin_sources(build_config(settings())) == {n: sha256(t) for n, t in {**named, **beside}.items()}
    # Beside an installed module lie those of everybody.
    monkeypatch.setattr(sources, "is_installed", lambda file: True)
    assert plugin_sources(build_config(settings())) == {n: sha256(t) for n, t in named.items()}


def test_a_plug_in_of_a_package_counts_with_the_modules_of_the_package(own, monkeypatch):
    text = "from .rates import RATE\n" + OWN.replace("own_plugins:", "own_pack:")
    files = {
        "own_pack.rates": "from .deep.low import RATE\n",
        "own_pack.deep": "",
        "own_pack.deep.low": "import own_other\nfrom ..high import RATE\n",
        "own_pack.high": "RATE = 1\n",
        "own_other": "",
    }
    (own / "own_pack" / "deep").mkdir(parents=True)
    (own / "own_pack" / "__init__.py").write_text(text)
    for name, helper in files.items():
        place = own.joinpath(*name.split("."))
        (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).write_text(helper)
    config = build_config(settings(algorithm="own_pack:Still"))
    named = {"own_pack:Learner": sha256(text), "own_pack:Still": sha256(text)}
    beside = {name: sha256(helper) for name, helper in files.items()}
    assert plugin_sources(config) == named | beside
    monkeypatch.setattr(sources, "is_installed", lambda file: True)
    del beside["own_other"]
    assert plugin_sources(config) == named | beside


def test_a_plug_in_whose_file_has_gone_since_it_was_imported_is_refused(own):
    config = build_config(settings())
    (own / "own_plugins.py").unlink()
    with pytest.raises(
        ConfigError, match=r"own_plugins\.py, from which own_plugins:Learner was imported, no longer exists"
    ):
        plugin_sources(config)


def test_own_paths_are_in_the_order_of_their_names():
    own = [f"own_{letter}:Env" for letter in "abcdefgh"]
    assert sources.own_paths(["metaloom.pipeline.envs.ant:AntDir", *reversed(own), "ant-dir"]) == own


def test_what_is_not_written_in_python_has_no_source():
    config = build_config({"env": "point-corner", "algorithm": "promp"})
    assert plugin_sources(config.model_copy(update={"metrics": ("math:sqrt",)})) == {}


@pytest.mark.usefixtures("own")
def test_an_algorithm_whose_learner_is_none_is_refused_before_it_is_called():
    config = build_config(settings())
    with pytest.raises(
        ConfigError, match=r"'own_plugins:Learner', which is the class .*; expected a subclass of .*:Le"
    ):
        config.algorithm.build(None)


def test_places_of_modules_are_found_without_importing_them(own, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))  # as of a script: python -m has a spec
    (own / "own_package").mkdir()
    (own / "own_package" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (own / "own_folder").mkdir()
    assert place_of("own_plugins") == str(own / "own_plugins.py")
    assert place_of("own_package.deep") == str(own / "own_package" / "__init__.py")
    assert place_of("own_folder") == str(own / "own_folder")
    assert {place_of(name) for name in ("os", "sys", "json.decoder", "numpy", "gymnasium")} == {INSTALLED}
    assert {place_of(name) for name in ("no_such_module", "", ".own_plugins", "__main__", "a/b", "../x")} == {None}
    assert "own_package" not in sys.modules


def test_the_working_folder_is_searched_for_what_the_user_names_alone(own, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(own))])
    load(ALGORITHMS.path("promp"))
    assert str(own) not in sys.path
    load("own_plugins:Still")
    assert sys.path[-1] == str(own)
