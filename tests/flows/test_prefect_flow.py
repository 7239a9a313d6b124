"""Decisions and output of the flows themselves; they run under a server in test_prefect_server.py."""

import base64
import io
import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest
from httpx import ConnectError
from PIL import Image
from prefect.utilities.schema_tools import is_valid_schema, validate
from prefect.utilities.schema_tools.validation import ValidationError

from metaloom import storage
from metaloom.flows.observer import IterationReport
from metaloom.flows.prefect_app import artifacts as prefect_page
from metaloom.flows.prefect_app import deployments
from metaloom.flows.prefect_app.artifacts import (
    TrainingPage,
    artifact_key,
    iteration_line,
    publish_evaluation,
    publish_replay,
    summary,
    table_of,
)
from metaloom.flows.prefect_app.deployments import RunRequest, meta_train, meta_train_custom, settings_for
from metaloom.flows.recipes import RECIPES
from metaloom.flows.results.replay import ArrayDifference, StageReplay
from metaloom.flows.rollouts.workers import Backend
from metaloom.flows.views.report import ReportFiles
from metaloom.pipeline.algorithms import ALGORITHMS
from metaloom.pipeline.config.input import ConfigError
from metaloom.storage import StageRef

FOLDER = Path("runs/first")
NOTHING = RunRequest()


def report(iteration: int, iterations: int = 10, **metrics: float) -> IterationReport:
    returns = {"step_0.average_return": -1.0, "step_1.average_return": 2.0}
    return IterationReport(iteration, iterations, metrics or returns, {}, 61.0, 39_200.0)


@pytest.mark.parametrize("name", ["evaluate", "replay"])
def test_flows_besides_training_tell_nothing_of_dask_connections_either(name, tmp_path, monkeypatch):
    class Reached(Exception):
        """The work itself."""

    def work(*args, **options):
        raise Reached(logging.getLogger("distributed.core").getEffectiveLevel())

    monkeypatch.setattr(f"metaloom.flows.operations.{name}.{name}", work)
    logger = logging.getLogger("distributed")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        with pytest.raises(Reached, match=f"^{logging.WARNING}$"):
            getattr(deployments, name).fn(str(tmp_path))
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(before)


def test_a_flow_run_whose_run_another_one_trains_fails_with_who_does_and_leaves_it_alone(
    tiny_config, tmp_path, monkeypatch
):
    monkeypatch.setattr(TrainingPage, "open", lambda page, tag: None)
    monkeypatch.setattr(prefect_page, "get_run_logger", lambda: logging.getLogger("test"))
    config = tiny_config(iterations=2)
    about = {"config": config.model_dump(mode="json"), "config_digest": config.digest(), "environment": {}}
    with storage.create_run(tmp_path / "nightly", capacity=2, **about):
        before = sorted(tmp_path.rglob("*"))
        for _ in range(2):
            with pytest.raises(storage.RunLocked, match=r"nightly: process \d+ on .* has been writing it since"):
                meta_train_custom.fn(config, run=str(tmp_path / "nightly"), workers=0)
        assert sorted(tmp_path.rglob("*")) == before
    assert storage.verify_run(tmp_path / "nightly") == []


class Recorder:
    """Stands for Prefect's artifact functions and remembers the calls."""

    def __init__(self, monkeypatch):
        self.calls: list[str] = []
        self.shown: list[tuple] = []
        self.now = 0.0
        self.events: list[dict] = []
        for kind in ("create_image", "create_link", "create_markdown", "create_progress", "create_table"):
            monkeypatch.setattr(prefect_page, f"{kind}_artifact", self._recording(kind))
        monkeypatch.setattr(prefect_page, "curve_of", lambda run: "data:image/png;base64,")
        monkeypatch.setattr(prefect_page, "get_client", lambda **options: nullcontext(self))
        self.run = SimpleNamespace(iterations=[0])
        monkeypatch.setattr(prefect_page.storage, "open_run", lambda path: self.run)
        monkeypatch.setattr(prefect_page, "emit_event", lambda *args, **options: self.events.append((*args, options)))
        monkeypatch.setattr(prefect_page, "get_run_logger", lambda: logging.getLogger("test"))

    def _recording(self, kind):
        def record(*args, **kwargs):
            self.calls.append(kind)
            self.shown.append((*args, kwargs))
            return UUID(int=1)

        return record

    def update_artifact(self, id, artifact):
        assert id == UUID(int=1)
        if isinstance(artifact.data, float):
            self.calls.append("update_progress")
            self.shown.append((id, artifact.data))
        else:
            assert artifact.data == "data:image/png;base64,"
            self.calls.append("update_image")

    def page(self) -> TrainingPage:
        return TrainingPage(FOLDER, clock=lambda: self.now)


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


class TestSettings:
    def test_a_new_run_without_settings_has_the_default_recipe(self):
        assert settings_for(FOLDER, None, NOTHING) == RECIPES["first-steps"]()

    def test_seed_and_iterations_replace_those_of_the_recipe(self):
        settings = settings_for(FOLDER, None, RunRequest("promp-point-corner", seed=0, iterations=5))
        assert (settings.env.name, settings.seed, settings.iterations) == ("point-corner", 0, 5)

    def test_a_stored_run_goes_on_with_its_own_settings(self, tiny_config):
        stored = tiny_config()
        assert settings_for(FOLDER, stored, NOTHING) == stored

    def test_a_stored_run_may_be_asked_for_with_its_own_settings_and_more_iterations(self, tiny_config):
        asked = RunRequest(config=tiny_config(), iterations=50)
        assert settings_for(FOLDER, tiny_config(), asked) == tiny_config(iterations=50)

    def test_other_settings_than_the_stored_ones_are_refused_by_name_and_value(self, tiny_config):
        with pytest.raises(ConfigError, match="num_tasks is 4 in the stored run, but 5 was requested"):
            settings_for(FOLDER, tiny_config(), RunRequest(config=tiny_config(num_tasks=5)))

    @pytest.mark.parametrize("recorded", [{}, {"obs_style": "promp"}])
    def test_an_option_left_at_its_default_is_no_other_setting(self, tiny_config, recorded):
        stored = tiny_config(env={"name": "ant-dir", "options": recorded})
        assert settings_for(FOLDER, stored, RunRequest(config=tiny_config(env="ant-dir")))
        other = tiny_config(env={"name": "ant-dir", "options": {"obs_style": "v5"}})
        with pytest.raises(ConfigError, match=r"obs_style is 'promp' in the stored run, but 'v5' was requested"):
            settings_for(FOLDER, stored, RunRequest(config=other))

    def test_another_evaluation_than_the_stored_one_is_refused(self, tiny_config):
        asked = RunRequest(config=tiny_config(evaluation={"every": 5}))
        with pytest.raises(ConfigError, match=r"evaluation\.every is None in the stored run, but 5 was requested"):
            settings_for(FOLDER, tiny_config(), asked)

    @pytest.mark.parametrize("changes", [{"retention": {"keep_last": 2}}, {"stop": {"samples": 9}}])
    def test_what_a_stored_run_would_not_go_by_is_refused(self, tiny_config, changes):
        with pytest.raises(ConfigError, match=r"(retention\.keep_last|stop\.samples) is None in the stored run"):
            settings_for(FOLDER, tiny_config(), RunRequest(config=tiny_config(**changes)))

    def test_a_flow_run_is_retried_although_its_warm_start_was_pinned_meanwhile(
        self, tiny_config, monkeypatch, tmp_path
    ):
        monkeypatch.setenv("METALOOM_RUNS", str(tmp_path))
        pinned = {"run": str(tmp_path / "first"), "updates": 3, "digest": "0" * 64}
        stored = tiny_config(init_from=pinned)
        for start in ("first", "first@3", "first@best", pinned):
            asked = RunRequest(config=tiny_config(init_from=start))
            assert settings_for(FOLDER, stored, asked) == stored
        for start in ("first@2", "other"):
            asked = RunRequest(config=tiny_config(init_from=start))
            with pytest.raises(ConfigError, match=r"init_from\.run is"):
                settings_for(FOLDER, stored, asked)
        for before, after in ((stored, tiny_config()), (tiny_config(), stored)):
            with pytest.raises(ConfigError, match=r"init_from\b"):
                settings_for(FOLDER, before, RunRequest(config=after))

    def test_an_empty_folder_counts_as_new(self, tmp_path):
        assert not storage.run_exists(tmp_path)
        assert not storage.run_exists(tmp_path / "missing")
        (tmp_path / "run.json").touch()
        assert storage.run_exists(tmp_path)


def form(flow):
    return flow.parameters.model_dump()


FORMS = pytest.mark.parametrize("flow", [meta_train, meta_train_custom], ids=lambda flow: flow.name)


class TestForm:
    @FORMS
    def test_the_schema_is_one_that_the_server_can_check(self, flow):
        is_valid_schema(form(flow))

    @FORMS
    def test_every_parameter_is_described(self, flow):
        properties = form(flow)["properties"]
        assert [name for name, field in properties.items() if not field.get("description")] == []

    @FORMS
    def test_every_field_is_of_one_kind_and_has_the_default_that_it_means(self, flow):
        properties = form(flow)["properties"]
        assert [name for name, field in properties.items() if "anyOf" in field] == []
        assert [name for name, field in properties.items() if field.get("default") is None] == form(flow).get(
            "required", []
        )

    def test_an_untouched_form_trains_the_first_steps(self):
        schema = form(meta_train)
        validate({}, schema, raise_on_error=True)
        assert "config" not in schema["properties"]
        assert {name: field["default"] for name, field in schema["properties"].items()} == {
            "recipe": "first-steps",
            "iterations": 0,
            "seed": RECIPES["first-steps"]().seed,
            "run": "",
            "workers": 2,
            "scheduler": "",
            "log": [],
            "trust": False,
            "overrides": [],
        }
        steps = RECIPES["first-steps"]()
        assert steps.iterations * steps.nominal_steps_per_iteration < 10**6

    def test_a_choice_that_is_left_as_the_form_has_it_is_as_stored(self, tiny_config, monkeypatch, tmp_path):
        asked = []
        monkeypatch.setattr(deployments, "_train", lambda *args, **options: asked.append((*args, options)))
        meta_train.fn(run=str(tmp_path))
        meta_train.fn("promp", 5, 2, "r", workers=3, scheduler="", log=["wandb"], trust=True)
        meta_train.fn(scheduler="tcp://10.0.0.1:8786")
        (left, changed, elsewhere) = asked
        assert left[:2] == (RunRequest(), str(tmp_path))
        assert left[2].workers is None
        assert changed == (RunRequest("promp", None, 2, 5), "r", Backend(workers=3), ["wandb"], {"trust": True})
        assert elsewhere[2] == Backend(scheduler="tcp://10.0.0.1:8786")

    def test_settings_of_ones_own_are_passed_on(self, tiny_config, monkeypatch):
        asked = []
        monkeypatch.setattr(deployments, "_train", lambda *args, **options: asked.append((*args, options)))
        meta_train_custom.fn(tiny_config(), workers=3, step_timeout=2.5, retries=0, film_every=4)
        meta_train_custom.fn(tiny_config(), workers=0)
        ((what, run, backend, log, options), here) = asked
        assert (what, run, log) == (RunRequest(config=tiny_config()), "", [])
        assert backend == Backend(workers=3, step_timeout_seconds=2.5, retries=0)
        assert here[2] == Backend(workers=0)
        assert options == {"film_every": 4, "trust": False}

    def test_settings_inside_config_are_described(self):
        schema = form(meta_train_custom)
        assert (
            "Complete episodes" in schema["definitions"]["RunConfig"]["properties"]["episodes_per_task"]["description"]
        )

    def test_every_recipe_is_offered(self):
        schema = form(meta_train)
        offered = schema["properties"]["recipe"]["enum"]
        assert sorted(offered) == sorted(RECIPES)
        validate({"recipe": offered[0]}, schema, raise_on_error=True)

    @pytest.mark.parametrize("algorithm", list(ALGORITHMS.builtin))
    def test_settings_of_every_algorithm_fit_the_form(self, algorithm):
        config = next(config for make in RECIPES.values() if (config := make()).algorithm.name == algorithm)
        validate({"config": config.model_dump(mode="json")}, form(meta_train_custom), raise_on_error=True)

    def test_settings_of_a_custom_algorithm_and_baseline_fit_the_form(self):
        names = {"algorithm": {"name": "own:Algorithm", "mine": 1}, "baseline": {"name": "own:Baseline", "mine": 1}}
        validate({"config": {"env": {"name": "point-corner"}, **names}}, form(meta_train_custom), raise_on_error=True)

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
        validate(parameters, form(meta_train_custom), raise_on_error=True)
        schema = form(meta_train_custom)["definitions"]
        for section in ("EvaluationConfig", "RetentionConfig", "StoppingConfig", "WarmStart"):
            fields = schema[section]["properties"]
            assert [name for name, field in fields.items() if not field.get("description")] == []

    @pytest.mark.parametrize(
        ("flow", "parameters"),
        [
            (meta_train, {"recipe": "promp-nowhere"}),
            (meta_train, {"seed": -1}),
            (meta_train, {"iterations": -1}),
            (meta_train, {"iterations": "many"}),
            (meta_train, {"workers": "two"}),
            (meta_train, {"log": ["csv"]}),
            (meta_train_custom, {}),
            (meta_train_custom, {"config": {"env": {"name": "point-corner"}, "algorithm": {"name": "prompt"}}}),
            (
                meta_train_custom,
                {"config": {"env": {"name": "point-corner"}, "algorithm": {"name": "promp", "inner_lrs": 1}}},
            ),
        ],
    )
    def test_the_schema_refuses_what_is_out_of_range_or_of_another_kind(self, flow, parameters):
        with pytest.raises(ValidationError):
            validate(parameters, form(flow), raise_on_error=True)


class TestPage:
    def test_progress_is_shown_every_five_seconds_and_metrics_every_thirty(self, recorder):
        page = recorder.page()
        for second in range(31):
            recorder.now = float(second)
            page.iteration_done(report(second, iterations=100))
        # At seconds 0, 5, ... 30 and at 0 and 30.
        assert recorder.calls.count("create_progress") + recorder.calls.count("update_progress") == 7
        assert recorder.calls.count("create_table") == 2

    def test_the_curve_is_drawn_once_a_minute_into_the_same_artifact(self, recorder):
        page = recorder.page()
        recorder.run.iterations = []  # none that others see yet
        page.iteration_done(report(0, iterations=1000))
        assert "create_image" not in recorder.calls
        recorder.run.iterations = [0]
        for second in range(0, 181, 10):
            recorder.now = float(second)
            page.iteration_done(report(second, iterations=1000))
        assert [call for call in recorder.calls if "image" in call] == ["create_image", *["update_image"] * 3]

    def test_what_the_page_cannot_show_is_said_once_and_tried_again(self, recorder, monkeypatch, caplog):
        page = recorder.page()
        fails = [True, True, False]
        monkeypatch.setattr(prefect_page, "curve_of", lambda run: 1 / 0 if fails.pop(0) else "data:image/png;base64,")
        for minute in range(3):
            recorder.now = 60.0 * minute
            page.iteration_done(report(minute))
        assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
            "The page does not show all of this run, which continues: division by zero"
        ]
        assert recorder.calls[-1] == "create_image"

    def test_every_iteration_is_an_event(self, recorder):
        page = recorder.page()
        page.iteration_done(report(3, **{"step_0.average_return": 7.5, "loss": float("nan")}))
        page.iteration_done(report(4))
        (name, resource, options), _ = recorder.events
        assert name == "metaloom.iteration.done"
        assert resource == {"prefect.resource.id": "metaloom.run.first", "prefect.resource.name": "first"}
        assert options["payload"] == {
            "iteration": 3,
            "iterations": 10,
            "metrics": {"step_0.average_return": 7.5, "loss": None},
            "evaluation_returns": [],
        }

    def test_the_last_iteration_is_shown_at_once(self, recorder):
        page = recorder.page()
        page.iteration_done(report(8))
        page.iteration_done(report(9))
        expected = ["create_progress", "create_table", "create_image", "update_progress", "create_table"]
        assert recorder.calls == expected  # the last curve is drawn by `close`
        assert (recorder.shown[0][0], recorder.shown[3][:2]) == (90, (UUID(int=1), 100))
        description = "Metrics of iteration 9, 0:01:01 after the start"
        assert recorder.shown[4][-1] == {"key": "metrics-first", "description": description}

    def test_the_report_is_shown_at_the_end_although_the_server_was_just_away(self, recorder, monkeypatch, caplog):
        page, files = recorder.page(), ReportFiles(Path("runs/reports/first/c.png"), Path("runs/reports/first/r.html"))
        monkeypatch.setattr(prefect_page, "write_report", lambda run, folder: files)
        monkeypatch.setenv("METALOOM_REPORTS_URL", "http://127.0.0.1:4201")
        page.open(lambda: recorder.calls.append("tags"))
        assert recorder.calls == ["tags", "create_markdown"]
        recorder.run.iterations = []  # nothing was trained
        page.close()
        assert recorder.calls == ["tags", "create_markdown"]
        assert caplog.records == []
        recorder.run.iterations = [0]
        page.open(lambda: (_ for _ in ()).throw(ConnectError("refused")))
        page.open()
        page.close()
        assert recorder.calls[2:] == ["create_image", "create_markdown", "create_link"]
        address, *_ = recorder.shown[-1]
        assert address == "http://127.0.0.1:4201/first/r.html"

    def test_a_replay_is_a_table_with_a_row_per_stage_or_array_that_differs(self, recorder):
        ref = StageRef(3, "adapt", 0)
        differs = ArrayDifference(ref, "params.w", (1, 2), "0.5", "0.25", 0.25, 7, 1)
        publish_replay(FOLDER, [StageReplay(StageRef(3, "sample_tasks"), (), 0.1), StageReplay(ref, (differs,), 0.1)])
        rows, about = recorder.shown[0]
        nothing = dict.fromkeys(("array", "first index", "stored", "replayed", "max ulp"))
        assert rows == [
            {"stage": "i=3 sample_tasks", "result": "identical", **nothing},
            {
                "stage": "i=3 adapt k=0",
                "result": "differs",
                "array": "params.w",
                "first index": "[1, 2]",
                "stored": "0.5",
                "replayed": "0.25",
                "max ulp": 7,
            },
        ]
        assert about == {"key": "replay-first", "description": "Replay of runs/first"}

    def test_an_evaluation_is_a_table_of_its_summary(self, recorder):
        summary_rows = [SimpleNamespace(columns={"adaptation steps": 0, "return": 1.23456789})]
        outcome = SimpleNamespace(updates=1, tasks=[0, 1], summary=lambda: summary_rows)
        publish_evaluation(FOLDER, outcome)
        assert recorder.shown == [
            (
                [{"adaptation steps": 0, "return": 1.23457}],
                {"key": "evaluation-first", "description": "runs/first after 1 update, on 2 tasks"},
            )
        ]

    def test_a_line_tells_returns_before_and_after_adaptation(self):
        assert (
            iteration_line(report(3)) == "iteration 3 (4 of 10)  before −1  after 2  (mean over tasks)  39.2 k steps/s"
        )

    def test_a_line_of_a_run_without_adaptation_has_one_return(self):
        line = iteration_line(report(3, **{"step_0.average_return": 7.0}))
        assert line == "iteration 3 (4 of 10)  return 7  (mean over tasks)  39.2 k steps/s"

    def test_metrics_are_numbers_but_for_what_is_none(self):
        metrics = {"loss": float("nan"), "env_steps": 4000.0, "return": -1.2345678901}
        assert [(row["value"], type(row["value"])) for row in table_of(metrics)] == [
            ("nan", str),
            (4000, int),
            (-1.23457, float),
        ]

    def test_the_summary_names_run_report_and_commands(self, monkeypatch):
        files = ReportFiles(Path("/r/reports/first/c.png"), Path("/r/reports/first/r.html"))
        for part in ("/r/first", "c.png", "r.html", "metaloom resume /r/first"):
            assert part in summary(Path("/r/first"), files)
        monkeypatch.setenv("METALOOM_RUNS", "/r")
        monkeypatch.setenv("METALOOM_REPORTS_URL", "http://127.0.0.1:4201")
        assert "(http://127.0.0.1:4201/first/r.html)" in summary(Path("/r/first"), files)
        # Of another folder nothing is served.
        assert "http" not in summary(Path("/other/first"), files)

    def test_the_curve_is_an_image_that_needs_no_place_elsewhere(self, copy_tiny_run, tmp_path):
        run = storage.open_run(copy_tiny_run(tmp_path / "run"))
        kind, _, data = prefect_page.curve_of(run).partition(",")
        assert kind == "data:image/png;base64"
        assert Image.open(io.BytesIO(base64.b64decode(data))).size[0] > 600
        assert len(data) < 100_000

    @pytest.mark.parametrize(("run", "key"), [("First_Run.2", "run-first-run-2"), ("ä", "run-"), ("a--b", "run-a-b")])
    def test_artifact_keys_have_only_the_characters_that_prefect_takes(self, run, key):
        assert artifact_key("run", run) == key


def test_meta_train_takes_any_setting_and_refuses_another_one_for_a_run_that_exists():
    asked = RunRequest(recipe="promp-point-corner", overrides=("algorithm.inner_lr=0.05", "num_tasks=3"))
    wanted = settings_for(FOLDER, None, asked)
    assert (wanted.algorithm.inner_lr, wanted.num_tasks) == (0.05, 3)
    assert settings_for(FOLDER, wanted, RunRequest(overrides=("num_tasks=3",))) == settings_for(FOLDER, wanted, NOTHING)
    with pytest.raises(ConfigError, match="num_tasks is 3 in the stored run, but 4 was requested"):
        settings_for(FOLDER, wanted, RunRequest(overrides=("num_tasks=4",)))
    with pytest.raises(ConfigError, match="iner_lr: unknown key"):
        settings_for(FOLDER, None, RunRequest(overrides=("algorithm.iner_lr=1",)))


def test_a_replay_of_which_a_stage_differs_fails_its_flow_run(monkeypatch):
    class Outcomes(list):
        identical = property(lambda outcomes: all(outcome.identical for outcome in outcomes))

    monkeypatch.setattr(deployments, "publish_replay", lambda folder, outcomes: None)
    same, different = (SimpleNamespace(identical=identical, proved="identical") for identical in (True, False))
    failed = deployments._replayed("run@0", Outcomes([same, different]))
    assert failed.is_failed()
    assert failed.message.startswith("1 of 2 stages differ from what is stored")
    assert deployments._replayed("run@0", Outcomes([same, same])).is_completed()
