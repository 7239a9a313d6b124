"""Named configurations, as Python functions: the name a user types, the paper it comes from, the settings."""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metaloom.flows.recipes import (
    actor_critic,
    dice,
    e_maml,
    maml_ppo,
    maml_trpo,
    maml_vpg,
    off_policy,
    pearl,
    promp,
    vpg_dice,
)
from metaloom.pipeline.config.input import ConfigError, load_config
from metaloom.pipeline.config.run import RunConfig

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "a2c": actor_critic.a2c,
    "a2c-bob": actor_critic.a2c_bob,
    "dice-maml-half-cheetah-dir": dice.half_cheetah_dir,
    "dice-maml-point-corner": dice.point_corner,
    "dql": off_policy.dql,
    "dql-bob": off_policy.dql_bob,
    "e-maml-half-cheetah-dir": e_maml.half_cheetah_dir,
    "e-maml-point-corner": e_maml.point_corner,
    "maml-ppo-half-cheetah-dir": maml_ppo.half_cheetah_dir,
    "maml-ppo-point-corner": maml_ppo.point_corner,
    "maml-trpo-half-cheetah-dir": maml_trpo.half_cheetah_dir,
    "maml-trpo-navigation-2d": maml_trpo.navigation_2d,
    "maml-trpo-point-corner": maml_trpo.point_corner,
    "maml-vpg-half-cheetah-dir": maml_vpg.half_cheetah_dir,
    "maml-vpg-point-corner": maml_vpg.point_corner,
    "pearl-ant-dir": pearl.ant_dir,
    "pearl-ant-goal": pearl.ant_goal,
    "pearl-cheetah-dir": pearl.cheetah_dir,
    "pearl-cheetah-vel": pearl.cheetah_vel,
    "pearl-hopper-rand-params": pearl.hopper_rand_params,
    "pearl-humanoid-dir": pearl.humanoid_dir,
    "pearl-point-robot": pearl.point_robot,
    "pearl-sparse-point-robot": pearl.sparse_point_robot,
    "pearl-walker2d-rand-params": pearl.walker2d_rand_params,
    "ppo": actor_critic.ppo,
    "ppo-qq-su": actor_critic.ppo_qq_su,
    "ppo2": actor_critic.ppo2,
    "ppo2-pend": actor_critic.ppo2_pend,
    "promp-ant-dir": promp.ant_dir,
    "promp-ant-dir-2d": promp.ant_dir_2d,
    "promp-ant-goal": promp.ant_goal,
    "promp-half-cheetah-dir": promp.half_cheetah_dir,
    "promp-half-cheetah-vel": promp.half_cheetah_vel,
    "promp-hopper-rand-params": promp.hopper_rand_params,
    "promp-humanoid-dir": promp.humanoid_dir,
    "promp-humanoid-dir-2d": promp.humanoid_dir_2d,
    "promp-point-corner": promp.point_corner,
    "promp-swimmer-vel": promp.swimmer_vel,
    "promp-walker2d-dir": promp.walker2d_dir,
    "promp-walker2d-rand-params": promp.walker2d_rand_params,
    "promp-walker2d-vel": promp.walker2d_vel,
    "sac": off_policy.sac,
    "sac-omo": off_policy.sac_omo,
    "sac-pendulum": off_policy.sac_pendulum,
    "svpg": actor_critic.svpg,
    "svpg-omo": actor_critic.svpg_omo,
    "vpg-dice-half-cheetah-dir": vpg_dice.half_cheetah_dir,
    "vpg-dice-point-corner": vpg_dice.point_corner,
}


def load_settings(recipe_or_file: str) -> dict[str, Any]:
    """The settings of a recipe by name, or those in a YAML or JSON file."""
    if recipe_or_file in RECIPES:
        config = RECIPES[recipe_or_file]()
        # What a recipe leaves to the algorithm and the environment is decided anew when one of them is replaced.
        return config.model_dump(mode="json", include=config.model_fields_set)
    path = Path(recipe_or_file)
    if path.suffix in (".yaml", ".yml", ".json"):
        return load_config(path)
    close = difflib.get_close_matches(recipe_or_file, RECIPES)
    raise ConfigError(
        f"found recipe {recipe_or_file!r}; required one of {', '.join(sorted(RECIPES))}, or a .yaml or .json file"
        + (f". Did you mean {close[0]}?" if close else "")
    )
