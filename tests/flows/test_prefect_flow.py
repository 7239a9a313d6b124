"""Decisions and output of the flows themselves; they run under a server in test_prefect_server.py."""

import logging
from pathlib import Path
from uuid import UUID

import pytest
from prefect.utilities.schema_tools import is_valid_schema, validate
from prefect.utilities.schema_tools.validation import ValidationError

from metaloom.flows.commands.train import IterationReport
from metaloom.flows.prefect_app import artifacts as prefect_page
from metaloom.flows.prefect_app import deployments
from metaloom.flows.prefect_app.artifacts import TrainingPage, artifact_key, iteration_line, summary, table_of
from metaloom.flows.prefect_app.deployments import is_new, meta_train, settings_for
from metaloom.flows.recipes import RECIPES
from metaloom.flows.views.report import ReportFiles
from metaloom.pipeline.algorithms import ALGORITHMS
from metaloom.pipeline.config.input import ConfigError

FOLDER = Path("runs/first")
NOTHING = {"recipe": None, "config": None, "seed": None, "iterations": None}


def report(iteration: int, iterations: int = 10, **metrics: float) -> IterationReport:
    returns = {"step_0.average_return": -1.0, "step_1.average_return": 2.0}
    return IterationReport(iteration, iterations, metrics or returns, {}, 61.0, 39_200.0)


@pytest.mark.parametrize("name", ["evaluate", "replay"])
def test_flows_besides_training_tell_nothing_of_dask_connections_either(name, tmp_path, monkeypatch):
    class Reached(Exception):
        """The work itself."""

    def work(*args, **options):
        raise Reached(logging.getLogger("distributed.core").getEffectiveLevel())

    monkeypatch.setattr(deployments, f"{name}_run", work)
    logger = logging.getLogger("distributed")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        with pytest.raises(Reached, match=f"^{logging.WARNING}$"):
            getattr(deployments, name).fn(str(tmp_path))
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(before)


class Recorder:
    """Stands for Prefect's artifact functions and remembers the calls."""

    def __init__(self, monkeypatch):
        self.calls: list[str] = []
        self.now = 0.0
        for kind in ("create_link", "create_markdown", "create_progress", "create_table", "update_progress"):
            monkeypatch.setattr(prefect_page, f"{kind}_artifact", self._recording(kind))
        monkeypatch.setattr(prefect_page, "get_run_logger", lambda: logging.getLogger("test"))

    def _recording(self, kind):
        def record(*args, **kwargs):
            self.calls.append(kind)
            return UUID(int=1)

        return record

    def page(self) -> TrainingPage:
        return TrainingPage(FOLDER, clock=lambda: self.now)


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


class TestSettings:
    def test_a_new_run_without_settings_has_the_default_recipe(self):
        assert settings_for(FOLDER, None, **NOTHING) == RECIPES["promp-half-cheetah-dir"]()

    def test_seed_and_iterations_replace_those_of_the_recipe(self):
        asked = {**NOTHING, "recipe": "promp-point-corner", "seed": 0, "iterations": 5}
        settings = settings_for(FOLDER, None, **asked)
        assert (settings.env.name, settings.seed, settings.iterations) == ("point-corner", 0, 5)

    def test_a_stored_run_goes_on_with_its_own_settings(self, tiny_config):
        stored = tiny_config()
        assert settings_for(FOLDER, stored, **NOTHING) == stored

    def test_a_stored_run_may_be_asked_for_with_its_own_settings_and_more_iterations(self, tiny_config):
        asked = {**NOTHING, "config": tiny_config(), "iterations": 50}
        assert settings_for(FOLDER, tiny_config(), **asked) == tiny_config(iterations=50)

    def test_other_settings_than_the_stored_ones_are_refused_by_name_and_value(self, tiny_config):
        with pytest.raises(ConfigError, match="num_tasks is 4 there, 5 was asked for"):
            settings_for(FOLDER, tiny_config(), **{**NOTHING, "config": tiny_config(num_tasks=5)})

    @pytest.mark.parametrize("recorded", [{}, {"obs_style": "promp"}])
    def test_an_option_left_at_its_default_is_no_other_setting(self, tiny_config, recorded):
        stored = tiny_config(env={"name": "ant-dir", "options": recorded})
        assert settings_for(FOLDER, stored, **{**NOTHING, "config": tiny_config(env="ant-dir")})
        other = tiny_config(env={"name": "ant-dir", "options": {"obs_style": "v5"}})
        with pytest.raises(ConfigError, match=r"obs_style is 'promp' there, 'v5' was asked for"):
            settings_for(FOLDER, stored, **{**NOTHING, "config": other})

    def test_another_evaluation_than_the_stored_one_is_refused(self, tiny_config):
        asked = {**NOTHING, "config": tiny_config(evaluation={"every": 5})}
        with pytest.raises(ConfigError, match=r"evaluation\.every is None there, 5 was asked for"):
            settings_for(FOLDER, tiny_config(), **asked)

    @pytest.mark.parametrize("changes", [{"retention": {"keep_last": 2}}, {"stop": {"samples": 9}}])
    def test_what_a_stored_run_would_not_go_by_is_refused(self, tiny_config, changes):
        with pytest.raises(ConfigError, match=r"(retention\.keep_last|stop\.samples) is None there"):
            settings_for(FOLDER, tiny_config(), **{**NOTHING, "config": tiny_config(**changes)})

    def test_a_flow_run_is_retried_although_its_warm_start_was_pinned_meanwhile(
        self, tiny_config, monkeypatch, tmp_path
    ):
        monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
        pinned = {"run": str(tmp_path / "first"), "updates": 3, "digest": "0" * 64}
        stored = tiny_config(init_from=pinned)
        for start in ("first", "first@3", "first@best", pinned):
            asked = {**NOTHING, "config": tiny_config(init_from=start)}
            assert settings_for(FOLDER, stored, **asked) == stored
        for start in ("first@2", "other"):
            asked = {**NOTHING, "config": tiny_config(init_from=start)}
            with pytest.raises(ConfigError, match=r"init_from\.run is"):
                settings_for(FOLDER, stored, **asked)

    def test_recipe_and_config_together_are_refused(self, tiny_config):
        with pytest.raises(ConfigError, match="recipe"):
            settings_for(FOLDER, None, **{**NOTHING, "recipe": "promp-point-corner", "config": tiny_config()})

    def test_an_empty_folder_counts_as_new(self, tmp_path):
        assert is_new(tmp_path)
        assert is_new(tmp_path / "missing")
        (tmp_path / "run.json").touch()
        assert not is_new(tmp_path)


class TestForm:
    def test_the_schema_is_one_that_the_server_can_check(self):
        is_valid_schema(meta_train.parameters.model_dump())

    def test_every_parameter_is_described(self):
        properties = meta_train.parameters.model_dump()["properties"]
        assert [name for name, field in properties.items() if not field.get("description")] == []

    def test_settings_inside_config_are_described(self):
        schema = meta_train.parameters.model_dump()
        assert (
            "Complete episodes" in schema["definitions"]["RunConfig"]["properties"]["episodes_per_task"]["description"]
        )

    def test_every_recipe_is_offered(self):
        schema = meta_train.parameters.model_dump()
        (offered,) = [kind["enum"] for kind in schema["properties"]["recipe"]["anyOf"] if "enum" in kind]
        assert sorted(offered) == sorted(RECIPES)
        validate({"recipe": offered[0]}, schema, raise_on_error=True)

    @pytest.mark.parametrize("algorithm", list(ALGORITHMS.builtin))
    def test_settings_of_every_algorithm_fit_the_form(self, algorithm):
        config = next(config for make in RECIPES.values() if (config := make()).algorithm.name == algorithm)
        parameters = {"config": config.model_dump(mode="json")}
        validate(parameters, meta_train.parameters.model_dump(), raise_on_error=True)

    def test_every_section_of_the_settings_fits_the_form(self, tiny_config):
        sections = {
            "evaluation": {"every": 2, "adaptation_steps": 1},
            "retention": {"keep_last": 3, "max_bytes": 10**9},
            "stop": {"samples": 1000, "return_threshold": 5.0, "combine": "all"},
            "init_from": {"run": "first", "updates": 3},
        }
        config = tiny_config(**sections).model_dump(mode="json")
        assert config["stop"]["samples"] == 1000
        parameters = {"config": config, "step_timeout": 2.5, "retries": 0}
        validate(parameters, meta_train.parameters.model_dump(), raise_on_error=True)
        schema = meta_train.parameters.model_dump()["definitions"]
        for section in ("EvaluationConfig", "RetentionConfig", "StoppingConfig", "WarmStart"):
            fields = schema[section]["properties"]
            assert [name for name, field in fields.items() if not field.get("description")] == []

    @pytest.mark.parametrize(
        "parameters",
        [
            {"recipe": "promp-nowhere"},
            {"seed": -1},
            {"iterations": 0},
            {"iterations": "many"},
            {"workers": "two"},
            {"config": {"env": {"name": "point-corner"}, "algorithm": {"name": "promp", "inner_lrs": 1}}},
        ],
    )
    def test_the_schema_refuses_what_is_out_of_range_or_of_another_kind(self, parameters):
        with pytest.raises(ValidationError):
            validate(parameters, meta_train.parameters.model_dump(), raise_on_error=True)


class TestPage:
    def test_progress_is_shown_every_five_seconds_and_metrics_every_thirty(self, recorder):
        page = recorder.page()
        for second in range(31):
            recorder.now = float(second)
            page.iteration_done(report(second, iterations=100))
        # At seconds 0, 5, ... 30 and at 0 and 30.
        assert recorder.calls.count("create_progress") + recorder.calls.count("update_progress") == 7
        assert recorder.calls.count("create_table") == 2

    def test_the_last_iteration_is_shown_at_once(self, recorder):
        page = recorder.page()
        page.iteration_done(report(8))
        page.iteration_done(report(9))
        assert recorder.calls == ["create_progress", "create_table", "update_progress", "create_table"]

    def test_a_line_tells_returns_before_and_after_adaptation(self):
        assert iteration_line(report(3)) == "iteration 3 (4 of 10)  before −1  after 2  39.2 k steps/s"

    def test_a_line_of_a_run_without_adaptation_has_one_return(self):
        line = iteration_line(report(3, **{"step_0.average_return": 7.0}))
        assert line == "iteration 3 (4 of 10)  return 7  39.2 k steps/s"

    def test_metrics_that_are_not_finite_do_not_break_the_table(self):
        assert table_of({"loss": float("nan")}) == [{"metric": "loss", "value": "nan"}]

    def test_the_summary_names_run_report_and_commands(self):
        text = summary(Path("/r/first"), ReportFiles(Path("/r/reports/first/c.png"), Path("/r/reports/first/r.html")))
        for part in ("/r/first", "c.png", "r.html", "metaloom resume /r/first"):
            assert part in text

    @pytest.mark.parametrize(("run", "key"), [("First_Run.2", "run-first-run-2"), ("ä", "run-"), ("a--b", "run-a-b")])
    def test_artifact_keys_have_only_the_characters_that_prefect_takes(self, run, key):
        assert artifact_key("run", run) == key
