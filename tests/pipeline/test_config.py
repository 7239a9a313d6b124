import json

import pytest
from pydantic import ValidationError

from metaloom.pipeline.config.input import ConfigError, load_config, override
from metaloom.pipeline.config.run import RunConfig, build_config
from metaloom.pipeline.schema import Settings

MINIMAL = {"env": "point-corner", "algorithm": {"name": "promp"}}


def test_a_config_survives_json():
    config = build_config({**MINIMAL, "seed": 3})
    assert build_config(json.loads(config.model_dump_json())) == config
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 4


def test_a_bare_environment_name_is_short_for_its_section():
    assert build_config(MINIMAL) == build_config({**MINIMAL, "env": {"name": "point-corner"}})


@pytest.mark.parametrize(
    ("change", "field", "found", "allowed"),
    [
        ("algorithm.inner_learning_rate=0.1", "inner_learning_rate", "0.1", "unknown key"),
        ("iterations=0", "iterations", "0", "greater than or equal to 1"),
        ("num_tasks=many", "num_tasks", "many", "valid integer"),
        (
            "algorithm.lr_schedule={name: StepLR, option: 3}",
            "algorithm.lr_schedule.option:",
            "3",
            "did you mean options",
        ),
        ("processing.discount=1.5", "processing.discount", "1.5", "less than or equal to 1"),
        ("processing.gae_lambda=1.5", "processing.gae_lambda", "1.5", "less than or equal to 1"),
        ("algorithm.name=sarsa", "algorithm", "sarsa", "promp"),
        ("env.action_scale=-1", "env.action_scale", "-1", "greater than 0"),
        ("baseline=quadratic", "baseline", "quadratic", "linear_feature"),
        ("policy.hidden_sizes=[0]", "policy.hidden_sizes", "0", "greater than"),
        ("algorithm.outer_lr=.nan", "algorithm", "nan", "finite number"),
        ("iterations=true", "iterations", "True", "expected an integer"),
        ("iterations='5'", "iterations", "'5'", "expected an integer"),
        ("iterations=1e3", "iterations", "1000.0", "expected an integer"),
        ("policy.hidden_sizes=[8,true]", "policy.hidden_sizes.1", "True", "expected an integer"),
        ("algorithm.inner_lr=true", "algorithm.inner_lr", "True", "expected a number"),
        ("algorithm.inner_lr='0.1'", "algorithm.inner_lr", "'0.1'", "expected a number"),
        ("algorithm.first_order=1", "algorithm.first_order", "1", "expected true or false"),
        ("algorithm.first_order=yes", "algorithm.first_order", "'yes'", "expected true or false"),
        ("evaluation.tasks=held", "evaluation.tasks: Input", "'held'", "'held-out' or 'train'"),
        ("evaluation.tasks=[[a]]", "evaluation.tasks.0.0: Input", "'a'", "valid number"),
        ("env={}", "env.name: Field", "", "required"),
        ("seed=2024-01-01", "seed", "2024-01-01", "valid integer"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_path_what_was_found_and_what_is_allowed(change, field, found, allowed):
    with pytest.raises(ConfigError) as refusal:
        build_config(override(MINIMAL, [change]))
    assert field in str(refusal.value)
    assert found in str(refusal.value)
    assert allowed in str(refusal.value)


def test_discount_and_lambda_have_defaults_and_may_be_zero():
    for changes, expected in (([], (0.99, 1)), (["processing.discount=0", "processing.gae_lambda=0"], (0, 0))):
        processing = build_config(override(MINIMAL, changes)).processing
        assert (processing.discount, processing.gae_lambda) == expected
        assert not processing.scale_rewards


def test_an_integer_stands_for_a_float_and_values_of_options_stay_as_they_are():
    options = {"a": "5", "b": True, "c": [1, 2.0]}
    settings = {
        **MINIMAL,
        "env": {"name": "mine:Env", "options": options, "action_scale": 5},
        "policy": {"hidden_sizes": (4,)},
    }
    config = build_config(settings)
    assert (config.env.action_scale, config.env.options, config.policy.hidden_sizes) == (5.0, options, (4,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["algorithm.num_minibatches=50", "episodes_per_task=2", "max_episode_steps=20"],
            "num_minibatches is 50 but a task has at most 40 steps",
        ),
        (["algorithm.num_epochs=1", "algorithm.tolerance=0.1"], "tolerance is 0.1 but num_epochs is 1"),
        (["algorithm.num_epochs=1", "algorithm.target_kl=0.1"], "target_kl is 0.1 but num_epochs is 1"),
        (["algorithm.num_minibatches=2", "algorithm.target_kl=0.1"], "num_minibatches is 2; it acts between epochs"),
        (
            ["algorithm=dice-maml", "algorithm.num_epochs=2", "algorithm.tolerance=0.1"],
            "tolerance is 0.1 but the value of the DiCE loss is constant in the parameters",
        ),
        (
            ["algorithm.adaptive_inner_kl_penalty=true", "algorithm.inner_steps=0"],
            "adaptive_inner_kl_penalty is on but inner_steps is 0",
        ),
        (
            ["algorithm.adaptive_inner_kl_penalty=true", "algorithm.init_inner_kl_penalty=0"],
            "adaptive_inner_kl_penalty is on but init_inner_kl_penalty is 0",
        ),
        (["algorithm.target_inner_kl=0.5"], "target_inner_kl is 0.5 but adaptive_inner_kl_penalty is off"),
        (["algorithm.lr_schedule=linear"], "lr_schedule is linear but lr_horizon is not set"),
        (["algorithm.lr_horizon=5"], "lr_horizon is 5 but lr_schedule is constant"),
        (["algorithm.lr_decay=0.5"], "lr_decay is 0.5 but lr_schedule is constant"),
        (["algorithm.lr_schedule=exponential"], "lr_schedule is exponential but lr_decay is 1.0"),
        (["policy.min_std=2"], "min_std is 2.0 but init_std is 1.0"),
        (["iterations=100000001"], "iterations must be at most 100000000, got 100000001"),
        (["algorithm.inner_steps=10000"], "inner steps must be at most 10000, got 10001"),
    ],
)
def test_settings_that_contradict_each_other_or_the_format_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build_config(override(MINIMAL, changes))


def test_a_run_has_as_many_iterations_and_inner_steps_as_the_format():
    build_config(override(MINIMAL, ["iterations=100000000", "algorithm.inner_steps=9999"]))


VPG_DICE = {"algorithm": {"name": "vpg-dice"}, "processing": {"return_baseline": "zero"}}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "advantages"),
        ({"algorithm": {"name": "dice-maml"}}, "dice"),
        ({"algorithm": {"name": "dice-maml"}, "processing": {"discount": 0.5}}, "dice"),
        ({"algorithm": {"name": "dice-maml"}, "processing": {"name": "dice"}}, "dice"),
        (VPG_DICE, "dice"),
    ],
)
def test_the_algorithm_decides_on_the_processing(settings, name):
    config = build_config({**MINIMAL, **settings})
    assert config.processing.name == name
    assert config.processing.discount == settings.get("processing", {}).get("discount", 0.99)
    assert build_config(json.loads(config.model_dump_json())) == config
    assert RunConfig(**dict(config)) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"processing": {"name": "dice"}}, r"processing\.name is dice but the algorithm needs advantages"),
        (
            {"algorithm": {"name": "dice-maml"}, "processing": {"name": "advantages"}},
            r"processing\.name is advantages but the algorithm needs dice",
        ),
        ({"processing": {"dice_norm": "padded"}}, r"processing\.dice_norm is set but applies to DiCE only"),
        ({"processing": {"return_baseline": "zero"}}, r"processing\.return_baseline is set but applies to DiCE only"),
        (
            {"processing": {"return_baseline": "zero", "dice_norm": "padded"}},
            r"(?s)processing\.dice_norm is set .*processing\.return_baseline is set",
        ),
        (
            {"algorithm": {"name": "dice-maml"}, "processing": {"return_baseline": "zero", "gae_lambda": 0.9}},
            r"(?s)processing\.gae_lambda is set .*processing\.return_baseline is set",
        ),
        ({"algorithm": {"name": "vpg-dice"}}, r"processing\.return_baseline is not set"),
        (
            {"algorithm": {"name": "dice-maml"}, "processing": {"return_baseline": "linear_feature"}},
            r"processing\.return_baseline is set but the algorithm does not learn from advantages",
        ),
        (
            {"algorithm": {"name": "dice-maml"}, "processing": {"gae_lambda": 0.9}},
            r"processing\.gae_lambda is set but the algorithm does not learn from advantages",
        ),
        (
            {"algorithm": {"name": "dice-maml", "num_minibatches": 21}},
            r"num_minibatches is 21 but episodes_per_task is 20 and dice-maml takes whole episodes",
        ),
        (
            {"processing": {"adv_norm": "variance", "normalize_advantages": False}},
            "adv_norm is variance but normalize_advantages is off",
        ),
        (
            {
                "algorithm": {"name": "dice-maml"},
                "processing": {"dice_norm": "padded", "normalize_advantages": False},
            },
            "dice_norm is padded but nothing is normalized",
        ),
        ({"algorithm": {"name": "maml-trpo", "inner_loss": "dice"}}, "DiCE loss is not supported here"),
    ],
)
def test_processing_that_does_not_fit_is_refused_with_its_reason(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_config({**MINIMAL, **settings})


def test_every_wrong_setting_is_reported_at_once():
    with pytest.raises(ConfigError) as refusal:
        build_config(override(MINIMAL, ["iterations=0", "num_tasks=0"]))
    assert len(str(refusal.value).splitlines()) == 2
    with pytest.raises(ConfigError) as refusal:
        build_config(
            override(MINIMAL, ["num_tasks=1", "algorithm.gradient_noise=true", "algorithm.num_minibatches=9999"])
        )
    told = str(refusal.value).splitlines()
    assert [line.partition(" is ")[0] for line in told] == [
        "config: algorithm.gradient_noise",
        "config: algorithm.num_minibatches",
    ]


@pytest.mark.parametrize(
    "assignment", ["iterations", "=3", "a..b=1", "iterations.x=1", "a=[", "a=!!timestamp 2024-01-01", f"a={'9' * 5000}",
     'a={"b": 1, "b": 2}', "a={b: {c: 1, c: 2}}"],
)  # fmt: skip
def test_an_assignment_that_makes_no_sense_is_refused(assignment):
    with pytest.raises(ConfigError, match="--set"):
        override({"iterations": 3}, [assignment])


def test_an_assignment_that_would_undo_an_earlier_one_is_refused():
    with pytest.raises(ConfigError, match=r"replaces all of algorithm and discards algorithm\.inner_lr; put it before"):
        override({"algorithm": "promp"}, ["algorithm.inner_lr=0.5", "algorithm=maml-vpg"])
    merged = override(
        {"algorithm": "promp"}, ["algorithm=maml-vpg", "algorithm.inner_lr=0.5", "algorithm.inner_lr=0.6"]
    )
    assert merged == {"algorithm": {"name": "maml-vpg", "inner_lr": 0.6}}


def test_overrides_reach_into_sections_and_leave_the_original_alone():
    settings = {"env": "point-corner", "algorithm": {"name": "promp", "inner_lr": 0.1}}
    merged = override(settings, ["env.options.reward=dense", "algorithm.inner_lr=0.5", "seed=4"])
    assert merged == {
        "env": {"name": "point-corner", "options": {"reward": "dense"}},
        "algorithm": {"name": "promp", "inner_lr": 0.5},
        "seed": 4,
    }
    assert settings["algorithm"] == {"name": "promp", "inner_lr": 0.1}


def test_a_file_of_settings_is_read_as_yaml_or_json(tmp_path):
    (tmp_path / "a.yaml").write_text("env: point-corner\nalgorithm: {name: promp, inner_lr: 0.2}\n")
    (tmp_path / "a.json").write_text('{"env": "point-corner", "algorithm": {"name": "promp", "inner_lr": 0.2}}')
    assert build_config(load_config(tmp_path / "a.yaml")) == build_config(load_config(tmp_path / "a.json"))


def test_a_date_in_a_file_is_text_and_refused_where_a_number_belongs(tmp_path):
    (tmp_path / "a.yaml").write_text("env: point-corner\nalgorithm: {name: promp}\nseed: 2024-01-01\n")
    with pytest.raises(ConfigError, match=r"seed: Input should be a valid integer.*; got '2024-01-01'"):
        build_config(override(load_config(tmp_path / "a.yaml"), ["iterations=1"]))


@pytest.mark.parametrize("text", ["- a\n", "a: [", "!!python/object/apply:os.system [echo]", "&a {b: *a}", "{" * 9999])
def test_a_file_that_is_no_mapping_of_plain_values_is_refused(tmp_path, text):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"a\.yaml"):
        load_config(tmp_path / "a.yaml")


def test_the_digest_covers_what_decides_the_numbers_and_not_where_a_run_stops():
    base = build_config(MINIMAL)
    assert build_config({**MINIMAL, "iterations": 5}).digest() == base.digest()
    assert build_config({**MINIMAL, "seed": 5}).digest() != base.digest()


class Described(Settings):
    rate: float = 1.0
    """A rate."""
    width: int = 3
    """A width."""


class Redefined(Described):
    rate: float = 2.0


def test_a_setting_that_is_defined_again_without_a_description_has_none():
    assert Described.descriptions() == {"rate": "A rate.", "width": "A width."}
    assert Redefined.descriptions() == {"width": "A width."}


def test_every_setting_has_a_description_or_a_telling_name_in_the_schema():
    schema = RunConfig.model_json_schema()
    assert schema["properties"]["episodes_per_task"]["description"]
    assert schema["$defs"]["MAMLVPG"]["properties"]["inner_lr"]["description"]  # of a class that it inherits from
    assert "promp" in json.dumps(schema)
    without_a_file = {}
    exec("class Own(RunConfig):\n    mine: int = 1\n    'Mine.'", {"RunConfig": RunConfig}, without_a_file)
    shown = without_a_file["Own"].model_json_schema()["properties"]
    assert shown["episodes_per_task"] == schema["properties"]["episodes_per_task"]
    assert "description" not in shown["mine"]
