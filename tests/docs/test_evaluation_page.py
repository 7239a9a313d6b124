"""`metaloom evaluate` takes the settings of an evaluation as options, as docs/evaluation.md says."""

from metaloom.flows.cli import app
from metaloom.pipeline.config.sections import EvaluationConfig


def test_every_setting_but_every_is_an_option_of_the_command():
    options = {name for argument in app["evaluate"].assemble_argument_collection() for name in argument.names}
    for name in EvaluationConfig.model_fields:
        assert (f"--{name.replace('_', '-')}" in options) == (name != "every"), name
