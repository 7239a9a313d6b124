"""Lazy imports for operations and commands; see `pipeline/lazy.py`."""

# pyright: reportUnusedImport=false
from typing import TYPE_CHECKING

from metaloom.pipeline.lazy import lazily

if TYPE_CHECKING:
    from metaloom.flows.as_recorded import arithmetic_of, start_as_recorded
    from metaloom.flows.commands.compare import compare as compare_runs
    from metaloom.flows.commands.compare import runs_named
    from metaloom.flows.commands.doctor import check_all, check_environment, env_config
    from metaloom.flows.commands.dry_run import dry_run
    from metaloom.flows.commands.fork import fork as fork_run
    from metaloom.flows.commands.optimize import fitted_baselines
    from metaloom.flows.commands.optimize import optimize as optimize_run
    from metaloom.flows.commands.optimize import sweep as optimize_grid
    from metaloom.flows.commands.replay import compare as compare_arrays
    from metaloom.flows.commands.replay import compare_digests, debug_stage, reproduce_kept
    from metaloom.flows.commands.replay import replay as replay_run
    from metaloom.flows.commands.sweep import train_sweep, trials_of
    from metaloom.flows.commands.task_file import load_tasks
    from metaloom.flows.commands.thin import materialise as materialise_run
    from metaloom.flows.commands.thin import thin as thin_run
    from metaloom.flows.commands.train import resume as resume_run
    from metaloom.flows.commands.train import resuming, training
    from metaloom.flows.commands.train import train as train_run
    from metaloom.flows.estimate import check_sizes
    from metaloom.flows.films.video import EvaluationFilm
    from metaloom.flows.films.video import video as film_run
    from metaloom.flows.graph.changes import warn_changed_sources
    from metaloom.flows.graph.run_stages import config_of, require_stored_sizes, stages_of
    from metaloom.flows.interrupt import stop_on_interrupt
    from metaloom.flows.loggers.live import log_folder, logging_to
    from metaloom.flows.metrics_endpoint import metrics_at
    from metaloom.flows.observer import Observer
    from metaloom.flows.observer import strict as strictly
    from metaloom.flows.opened import FinishedIteration, Run, Runs
    from metaloom.flows.recipes import RECIPES, is_settings_file, load_settings, new_config
    from metaloom.flows.references.archive import add as add_reference
    from metaloom.flows.references.archive import extract as extract_reference
    from metaloom.flows.references.archive import opened as opened_reference
    from metaloom.flows.references.index import INDEX, Added, Extracted, References, read_index, reference_rows, shipped
    from metaloom.flows.references.index import find as find_reference
    from metaloom.flows.references.verify import verify as verify_reference
    from metaloom.flows.results.checks import Checks
    from metaloom.flows.results.evaluation import EvaluationOutcome
    from metaloom.flows.results.sweep import SweepObserver, best_of
    from metaloom.flows.run_groups import settings_of
    from metaloom.flows.run_log import LogLine, LogLines, LogReader
    from metaloom.flows.settings import assignments, plain, settings_file
    from metaloom.flows.sweeps.plan import plan, plan_search
    from metaloom.flows.sweeps.space import parse_grid, parse_space, wanted_search
    from metaloom.flows.sweeps.stored import find_sweep, require_sweep
    from metaloom.flows.trained.policy import policy_of
    from metaloom.flows.trust import trust_run
    from metaloom.flows.viewer.pages import serve as serve_viewer
    from metaloom.flows.views.charts import check_plot_file, draw, write_plot
    from metaloom.flows.views.diagrams import FORMATS, diagram_of
    from metaloom.flows.views.page import Picture
    from metaloom.flows.views.progress import progress as shown_progress
    from metaloom.flows.views.progress import sweep_progress
    from metaloom.flows.views.report import write_figures, write_report
    from metaloom.flows.views.run_charts import per_shot_chart
    from metaloom.flows.views.run_info import (
        bytes_by_group,
        is_complete,
        iteration_info,
        list_run_row,
        output_info,
        run_info,
    )
    from metaloom.flows.views.sweep_tables import best_lines, search_info, sweep_rows, sweep_table
    from metaloom.flows.views.tables import (
        counterfactual_table,
        difference_table,
        fork_view,
        grid_table,
        iteration_view,
        minibatch_info,
        minibatch_view,
        output_view,
        parameters_table,
        recipe_rows,
        recipes_table,
        replay_line,
        run_view,
    )
    from metaloom.flows.views.watching import Watch, watch_run
    from metaloom.pipeline.config.input import override
    from metaloom.pipeline.config.run import RunConfig, build_config
    from metaloom.pipeline.config.sources import plugin_sources
    from metaloom.pipeline.envs import PLUGINS
    from metaloom.pipeline.envs.registry import make_env
    from metaloom.pipeline.shown import suggestion
    from metaloom.pipeline.tasks.evaluation import tasks_are_new, tasks_drawn_from
    from metaloom.stages.evaluate import unseen as untested
else:
    __getattr__ = lazily(__name__)
