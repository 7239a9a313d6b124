"""Environments with a distribution of tasks, and gymnasium environments as a single task.

To add one, put its file in this folder and add a line to ENVS.
"""

from metaloom.pipeline.envs.metaworld.names import FAMILIES
from metaloom.pipeline.plugins import Plugins

ENVS: dict[str, str] = {
    "ant-dir": "metaloom.pipeline.envs.ant:AntDir",
    "ant-dir-2d": "metaloom.pipeline.envs.ant:AntDir2D",
    "ant-goal": "metaloom.pipeline.envs.ant:AntGoal",
    "bernoulli-bandit": "metaloom.pipeline.envs.bandit:BernoulliBandit",
    "half-cheetah-dir": "metaloom.pipeline.envs.half_cheetah:HalfCheetahDir",
    "half-cheetah-vel": "metaloom.pipeline.envs.half_cheetah:HalfCheetahVel",
    "hidden-goal-grid": "metaloom.pipeline.envs.hidden_goal_grid:HiddenGoalGrid",
    "hopper-rand-params": "metaloom.pipeline.envs.hopper:HopperRandParams",
    "humanoid-dir": "metaloom.pipeline.envs.humanoid:HumanoidDir",
    "humanoid-dir-2d": "metaloom.pipeline.envs.humanoid:HumanoidDir2D",
    **FAMILIES,
    "navigation-2d": "metaloom.pipeline.envs.point:Navigation2D",
    "pearl-ant-dir": "metaloom.pipeline.envs.ant:PearlAntDir",
    "pearl-ant-goal": "metaloom.pipeline.envs.ant:PearlAntGoal",
    "pearl-cheetah-dir": "metaloom.pipeline.envs.half_cheetah:PearlCheetahDir",
    "pearl-cheetah-vel": "metaloom.pipeline.envs.half_cheetah:PearlCheetahVel",
    "pearl-hopper-rand-params": "metaloom.pipeline.envs.hopper:PearlHopperRandParams",
    "pearl-humanoid-dir": "metaloom.pipeline.envs.humanoid:PearlHumanoidDir",
    "pearl-point-robot": "metaloom.pipeline.envs.point_pearl:PearlPointRobot",
    "pearl-sparse-point-robot": "metaloom.pipeline.envs.point_pearl:PearlSparsePointRobot",
    "pearl-walker2d-rand-params": "metaloom.pipeline.envs.walker2d:PearlWalker2dRandParams",
    "point-2d": "metaloom.pipeline.envs.point:Point2D",
    "point-2d-goal": "metaloom.pipeline.envs.point:Point2DGoal",
    "point-corner": "metaloom.pipeline.envs.point_corner:PointCorner",
    "point-momentum": "metaloom.pipeline.envs.point_corner:PointMomentum",
    "point-walls": "metaloom.pipeline.envs.point_corner:PointWalls",
    "swimmer-vel": "metaloom.pipeline.envs.swimmer:SwimmerVel",
    "tabular-mdp": "metaloom.pipeline.envs.tabular_mdp:TabularMDP",
    "walker2d-dir": "metaloom.pipeline.envs.walker2d:Walker2dDir",
    "walker2d-rand-params": "metaloom.pipeline.envs.walker2d:Walker2dRandParams",
    "walker2d-vel": "metaloom.pipeline.envs.walker2d:Walker2dVel",
}
"""Environment classes as module:Class, keyed by name. A module is imported only when the environment is made."""

PLUGINS = Plugins("environment", "metaloom.envs", ENVS)

REPRODUCED = "witness_reproduced"
"""Name of a per-iteration metric: 1 if the witness episode was reproduced bit for bit, otherwise 0."""
