"""The classes of ML10 as rules for rows: their inputs and their rewards.

Rewards follow version v2, the package's default.
"""

from metaloom.pipeline.envs.metaworld.rows import fixtures, moving
from metaloom.pipeline.envs.metaworld.rows.scene import RowTask, Source

_PUCK, _PUCK_TURN = Source("xpos", "obj"), Source("geom_xmat", "objGeom")
_DOOR, _DOOR_TURN = Source("geom_xpos", "handle"), Source("geom_xmat", "handle")
_DOOR_ANGLE = Source("qpos", "doorjoint")

_TARGET = {"target": "_target_pos"}
_CARRIED = {**_TARGET, "object": "obj_init_pos", "fingertips": "init_tcp"}

_BOXES_AROUND_THE_HOLE = {
    f"{role}_{box}": Source("site_xpos", f"{corner}_corner_collision_box_{box}")
    for box in (1, 2)
    for role, corner in (("empty", "bottom_right"), ("full", "top_left"))
}

TRAIN_ROWS = {
    "reach": RowTask(moving.reach, _PUCK, _PUCK_TURN, start={**_TARGET, "hand": "hand_init_pos"}),
    "push": RowTask(moving.push, _PUCK, _PUCK_TURN, start=_CARRIED, touched=True),
    "pick-place": RowTask(moving.pick_place, _PUCK, _PUCK_TURN, start=_CARRIED, touched=True),
    "door-open": RowTask(fixtures.door_open, _DOOR, _DOOR_TURN, sources={"angle": _DOOR_ANGLE}, start=_TARGET),
    "drawer-close": RowTask(
        fixtures.drawer_close, Source("xpos", "drawer_link"), None, offset=(0, -0.16, 0.05), start=_CARRIED
    ),
    "button-press-topdown": RowTask(
        fixtures.button_press_topdown,
        Source("xpos", "button"),
        Source("xquat", "button"),
        offset=(0, 0, 0.193),
        start={**_TARGET, "fingertips": "init_tcp", "depth": "_obj_to_target_init"},
    ),
    "peg-insert-side": RowTask(
        moving.peg_insert_side,
        Source("site_xpos", "pegGrasp"),
        Source("site_xmat", "pegGrasp"),
        sources={"peg_head": Source("site_xpos", "pegHead"), **_BOXES_AROUND_THE_HOLE},
        start={**_CARRIED, "peg_head": "peg_head_pos_init"},
    ),
    "window-open": RowTask(
        fixtures.window_open,
        Source("site_xpos", "handleOpenStart"),
        None,
        start={**_CARRIED, "handle": "window_handle_pos_init"},
    ),
    "sweep": RowTask(moving.sweep, _PUCK, Source("xquat", "obj"), start=_CARRIED, touched=True),
    "basketball": RowTask(
        moving.basketball,
        Source("xpos", "bsktball"),
        Source("xquat", "bsktball"),
        # The official class keeps a view of the site's present position, which does not move.
        sources={"target": Source("site_xpos", "goal")},
        start={"object": "obj_init_pos", "fingertips": "init_tcp"},
    ),
}
TEST_ROWS = {
    "drawer-open": RowTask(
        fixtures.drawer_open,
        Source("xpos", "drawer_link"),
        Source("xquat", "drawer_link"),
        offset=(0, -0.16, 0),
        start={**_TARGET, "fingertips": "init_tcp"},
    ),
    "door-close": RowTask(
        fixtures.door_close, _DOOR, _DOOR_TURN, start={**_TARGET, "object": "obj_init_pos", "hand": "hand_init_pos"}
    ),
    "shelf-place": RowTask(moving.shelf_place, _PUCK, _PUCK_TURN, start=_CARRIED, touched=True),
    "sweep-into": RowTask(moving.sweep_into, _PUCK, _PUCK_TURN, start=_CARRIED, touched=True),
    "lever-pull": RowTask(
        fixtures.lever_pull,
        Source("site_xpos", "leverStart"),
        Source("geom_xmat", "objGeom"),
        sources={"angle": Source("qpos", "LeverAxis")},
        start={**_TARGET, "fingertips": "init_tcp", "lever": "_lever_pos_init"},
    ),
}

ROW_TASKS = {**TRAIN_ROWS, **TEST_ROWS}
"""Name of a class, as the package has it without its version -> its rules."""
