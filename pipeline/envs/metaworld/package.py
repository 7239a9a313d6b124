"""The package `metaworld`, imported when an environment of it is made, and what of it does not fit newer MuJoCo."""
# pyright: reportAttributeAccessIssue=false
# MuJoCo's compiled modules have no type stubs.

import importlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import mujoco
import numpy as np

from metaloom.pipeline.envs.contract import EnvError

VERSION = "3.1.1"
"""The one that the bits of stored runs are of: rewards differ from version to version."""


@cache
def official_classes() -> Mapping[str, type[Any]]:
    """Name of a class of tasks -> the package's environment class.

    Raises:
        EnvError: the package is missing, or is another version.
    """
    try:
        found = version("metaworld")
        importlib.import_module("scipy")
    except (PackageNotFoundError, ImportError):
        raise EnvError(_install("is not installed, or scipy is not")) from None
    if found != VERSION:
        raise EnvError(_install(f"is version {found}"))
    base = importlib.import_module("metaworld.sawyer_xyz_env").SawyerMocapBase
    base.reset_mocap_welds = _reset_mocap_welds
    classes = importlib.import_module("metaworld.env_dict").ALL_V3_ENVIRONMENTS
    return {name.removesuffix("-v3"): cls for name, cls in classes.items()}


def _install(found: str) -> str:
    # Without its dependencies, because it asks for MuJoCo 3.3.0, which has no batches.
    return (
        f"env.name: the package metaworld {found}; required version {VERSION}: `make metaworld` in a checkout, or "
        f"`pip install --no-deps metaworld=={VERSION} && pip install scipy`"
    )


def _reset_mocap_welds(env: Any) -> None:
    """Stand in for SawyerMocapBase.reset_mocap_welds, which writes 11 numbers into each row of `eq_data`.

    Newer MuJoCo has 12 of them, mjNEQDATA; the twelfth of a weld is unused.
    """
    model = env.model
    if model.nmocap:
        relative_pose = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 5.0]
        row = np.zeros(model.eq_data.shape[1])
        row[: len(relative_pose)] = relative_pose
        model.eq_data[model.eq_type == mujoco.mjtEq.mjEQ_WELD] = row
