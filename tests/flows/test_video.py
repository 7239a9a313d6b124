"""Films of stored episodes show what is stored, or say that they do not."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import mujoco
import numpy as np
import pytest
from imageio.v3 import improps
from PIL import Image, ImageDraw, ImageFont, ImageSequence

import metaloom
from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.thin import thin
from metaloom.flows.errors import ExtraMissing, UsageError
from metaloom.flows.films import opengl, painters
from metaloom.flows.films import video as commands_video
from metaloom.flows.films.painters import (
    FlatPainter,
    _camera,
    _lines_around,
    _View,
    camera_of_way,
    drawable,
    goal_of,
    painter_of,
    position_of,
)
from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.pictures import table_picture
from metaloom.pipeline.envs.point_corner import PointCorner
from metaloom.pipeline.types import TaskBatch
from metaloom.storage import Retention, StageRef

pytestmark = pytest.mark.slow

POINTS = {"num_tasks": 3, "episodes_per_task": 2, "max_episode_steps": 6, "iterations": 2}
ROBOT = {"num_tasks": 2, "episodes_per_task": 1, "max_episode_steps": 4, "iterations": 1}
SMALL = {"policy": {"hidden_sizes": [4]}, "progress": False}
SKY, GROUND, LINE = (214, 228, 240), (176, 190, 176), (150, 165, 150)


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    path = tmp_path_factory.mktemp("films") / "points"
    env = {"options": {"reward": "dense"}}
    return metaloom.train("promp-point-corner", path, env=env, **POINTS, **SMALL)


@pytest.fixture(scope="module")
def robot(tmp_path_factory):
    path = tmp_path_factory.mktemp("films") / "robot"
    return metaloom.train("promp-half-cheetah-dir", path, **ROBOT, **SMALL)


def pictures(path):
    with Image.open(path) as image:
        return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_a_film_shows_the_reset_and_every_step_of_both_episodes(points, tmp_path, suffix):
    done = metaloom.video(points, tmp_path / f"film{suffix}", 1, task=2, episode=1)
    shown = pictures(done.path)
    assert len(shown) == done.frames == 1 + 6
    assert done.largest_difference == 0
    assert all((a != b).any() for a, b in pairwise(shown))
    stored = [points[1].rollouts(k).rewards[2, 1].sum(dtype=float) for k in (0, 1)]
    assert [*done.returns.values()] == pytest.approx(stored)
    with Image.open(done.path) as image:
        image.load()
        assert image.info["duration"] == 100  # ms, as the robot's render_fps says
        assert image.info["loop"] == 0  # without end


def test_fewer_pictures_end_with_the_last_step(points, tmp_path):
    done = metaloom.video(points, tmp_path / "all.gif", steps=[1])
    few = metaloom.video(points, tmp_path / "few.gif", steps=[1], every=4)
    assert (done.frames, few.frames) == (7, 3)
    np.testing.assert_array_equal(pictures(few.path)[-1], pictures(done.path)[-1])
    with Image.open(few.path) as image:
        image.load()
        assert image.info["duration"] == 400  # ms for four steps


def test_mp4_holds_as_many_pictures_of_even_sides(points, tmp_path):
    done = metaloom.video(points, tmp_path / "film.mp4", every=2)
    shape = improps(done.path, plugin="FFMPEG").shape
    assert done.frames == 4
    assert [side % 2 for side in shape[1:3]] == [0, 0]
    assert shape[1:3] == pictures(metaloom.video(points, tmp_path / "film.png", every=2).path)[0].shape[:2]


@pytest.mark.parametrize(("declared", "every", "shown"), [(10, 2, 5), (125, 1, 50), (125, 5, 25), (None, 1, 20)])
def test_films_are_as_fast_as_the_environment_says_up_to_what_viewers_show(
    points, tmp_path, monkeypatch, declared, every, shown
):
    told = []
    monkeypatch.setitem(PointCorner.metadata, "render_fps", declared)
    monkeypatch.setattr(commands_video, "write_film", lambda frames, out, *about: told.extend((len([*frames]), *about)))
    metaloom.video(points, tmp_path / "film.gif", 1, task=2, episode=0, every=every)
    goal = "goal_x {:.3g}, goal_y {:.3g}".format(*points[1].tasks().params[2])
    assert told == [1 + -(-6 // every), shown, f"points, iteration 1, task 2 ({goal}), episode 0"]


def test_the_best_and_the_worst_task_are_those_after_adaptation(points, tmp_path):
    returns = points[0].rollouts(1).rewards.sum(-1, dtype=float).mean(1)
    found = {which: metaloom.video(points, tmp_path / "film.png", 0, task=which).task for which in ("best", "worst")}
    assert found == {"best": returns.argmax(), "worst": returns.argmin()}
    assert metaloom.video(points, tmp_path / "film.png", 0).task == 0


def test_observations_agree_up_to_a_hundred_thousandth():
    for largest, agrees in ((1e-5, True), (1.1e-5, False)):
        assert commands_video.Film(Path("film.gif"), 1, 0, {}, {}, largest).agrees == agrees
    assert commands_video._difference([1.0, -2.0], np.array([1.5, -2.0], np.float32)) == 0.5
    assert commands_video._difference([1.0], np.array([1.0, 2.0], np.float32)) == np.inf


def test_without_an_episode_it_is_the_one_of_median_return_on_each_side(points, tmp_path):
    done = metaloom.video(points, tmp_path / "film.png", 0, task="best")
    for step, when in enumerate(("before adaptation", "after 1 step of adaptation")):
        returns = points[0].rollouts(step).rewards[done.task].sum(-1, dtype=float)
        assert done.returns[when] == np.sort(returns)[0]  # of two episodes the lower one
        assert done.episodes[when] == returns.argmin()


def test_thinned_episodes_are_sampled_again(points, tmp_path):
    path = shutil.copytree(points.path, tmp_path / "thinned")
    thin(path, Retention(keep_last=1))
    run = storage.open_run(path)
    with pytest.raises(storage.StageThinned):
        run[0].rollouts(0)
    assert metaloom.video(run, tmp_path / "film.png", 0).agrees


def test_a_simulator_that_does_otherwise_today_is_told(points, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(PointCorner, "max_action", 0.19)
    assert cli.run(["video", f"{points.path}@0", "--out", str(tmp_path / "film.png")]) == 1
    assert "does not show what happened" in " ".join(capsys.readouterr().out.split())
    monkeypatch.undo()
    assert cli.run(["video", f"{points.path}@0", "--out", str(tmp_path / "film.png")]) == 0


def test_flat_drawing_puts_a_robot_where_the_camera_sees_it(robot, tmp_path):
    done = metaloom.video(robot, tmp_path / "film.png", renderer="flat", size=(320, 240), steps=[0])
    assert done.largest_difference == 0
    env = drawable(EnvConfig(name="half-cheetah-dir"))
    env.reset(seed=0)
    painter = painter_of(env, (320, 240), "flat")
    middle = painter.draw()[110:150, 140:180].reshape(-1, 3)
    assert (np.abs(middle.astype(int) - [204, 153, 102]).max(1) < 12).mean() > 0.1  # the torso's color
    env.unwrapped.data.qpos[1] += 1.5  # the robot jumps; its camera, which follows only along the track, does not
    mujoco.mj_forward(env.unwrapped.model, env.unwrapped.data)
    jumped = painter.draw()
    assert (jumped[110:150, 140:180].reshape(-1, 3) != middle).any()


@pytest.mark.parametrize("x", [1, -1])
def test_lines_on_the_ground_are_cut_where_they_pass_the_camera(x):
    ahead, up = (0.8 * x, 0, -0.6), (0.6 * x, 0, 0.8)
    eye = SimpleNamespace(pos=(0.2, 0.3, 1), forward=ahead, up=up, frustum_near=1, frustum_top=1)
    view = _View([eye, eye], 32, 24)
    lines = np.array([*_lines_around(view)])
    assert (lines[:, :, 2] == 0).all()
    along = lines[:, 0, :2] == lines[:, 1, :2]  # a line keeps its x or its y, which is a whole number of meters
    assert (along.sum(axis=1) == 1).all()
    assert (lines[:, 0, :2][along] % 1 == 0).all()
    whole = np.where(along, lines[:, 0, :2], np.nan)  # the place of each line, in the column that it keeps
    assert {*whole[along[:, 1], 1]} == {*range(-25, 26)}  # around the camera, which is nearest to 0, 0
    assert (lines[along[:, 1], 1, 0] == 25 * x).all()
    assert (view.depth(lines[:, 1]) > 0.2).all()
    near = view.depth(lines[:, 0])
    assert near.min() == pytest.approx(0.2)
    assert np.isclose(near, 0.2).sum() > 10


def test_a_camera_that_looks_up_sees_no_ground():
    model = mujoco.MjModel.from_xml_string("<mujoco/>")
    camera = mujoco.MjvCamera()
    camera.lookat[2], camera.elevation = 5, 80
    picture = FlatPainter(model, mujoco.MjData(model), camera, (32, 24)).draw()
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) == 1


def colors(picture):
    return {tuple(color) for color in picture.reshape(-1, 3).tolist()}


def test_the_horizon_is_where_the_camera_looks_level_and_nowhere_if_it_looks_down(monkeypatch):
    monkeypatch.setattr(painters, "_SMOOTH", 1)
    model, camera = mujoco.MjModel.from_xml_string("<mujoco/>"), mujoco.MjvCamera()
    camera.azimuth, camera.elevation = 30, -10
    picture = FlatPainter(model, mujoco.MjData(model), camera, (64, 64)).draw()
    focal = 32 / np.tan(np.radians(22.5))  # pixels, of the 45 degrees from top to bottom
    horizon = 32 - focal * np.tan(np.radians(10))
    assert colors(picture[: int(horizon)]) == {SKY}
    assert colors(picture[int(horizon) + 2 :]) == {GROUND, LINE}
    camera.elevation = -90
    picture = FlatPainter(model, mujoco.MjData(model), camera, (64, 64)).draw()
    assert colors(picture) == {GROUND, LINE}


def flat(geoms, goal=None):
    """A picture [64, 64, 3] along y of geoms, each as (position, type and size, color)."""
    geoms = "".join(f"<geom pos='{pos}' {form} rgba='{color} 1'/>" for pos, form, color in geoms)
    eye = "<camera name='track' pos='0 -3 1' xyaxes='1 0 0 0 0 1'/>"
    model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{eye}{geoms}</worldbody></mujoco>")
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return FlatPainter(model, data, _camera(model), (64, 64), goal).draw().astype(int)


def test_what_is_near_hides_what_is_behind_it_whatever_their_order():
    ball = "type='sphere' size='0.3'"
    red, green, low = ("0 0 1", ball, "1 0 0"), ("0 2 1", ball, "0 1 0"), ("0.6 1 0.4", ball, "0 0 1")
    pictures = [flat(order) for order in ((red, green, low), (green, low, red))]
    np.testing.assert_array_equal(*pictures)
    assert pictures[0][32, 32].tolist() == [255, 0, 0]
    ys, xs = np.nonzero(pictures[0][:, :, 2] > pictures[0][:, :, 1] + 50)  # the blue one: lower, and to the right
    assert ys.mean() > 36
    assert xs.mean() > 36


@pytest.mark.parametrize(
    ("form", "across", "up"),
    [
        ("type='sphere' size='0.3'", 0.3 / 3, 0.3 / 3),
        ("type='ellipsoid' size='0.2 0.3 0.4'", 0.3 / 3, 0.3 / 3),
        ("type='capsule' size='0.1 0.5'", 0.1 / 3, 0.6 / 3),
        ("type='capsule' size='0.1 0.5' euler='0 90 0'", 0.6 / 3, 0.1 / 3),
        ("type='box' size='0.5 0.5 0.5'", 0.5 / 2.5, 0.5 / 2.5),
        (None, 0.15 / 3, 0.15 / 3),
    ],
)
def test_shapes_are_as_large_as_they_are_far_away_and_have_a_darker_edge(form, across, up, monkeypatch):
    monkeypatch.setattr(painters, "_SMOOTH", 1)
    color = (204, 153, 102) if form else (60, 160, 75)
    edge = tuple(part * 55 // 100 for part in color)
    geoms = [("0 0 1", form, "0.8 0.6 0.4")] if form else []
    picture = flat(geoms, None if form else lambda: np.array([0.0, 0.0, 1.0]))  # a goal is a green ball
    assert colors(picture) == {SKY, GROUND, LINE, color, edge}
    edges = (picture == edge).all(-1)
    shape = edges | (picture == color).all(-1)
    assert edges[32].any()
    assert edges[:, 32].any()
    assert shape[32, 32]
    focal = 32 / np.tan(np.radians(22.5))
    for places, part in ((np.nonzero(shape.any(0))[0], across), (np.nonzero(shape.any(1))[0], up)):
        outline = 0 if form and "box" in form else 1
        assert (places[0], places[-1]) == pytest.approx(
            (32 - focal * part - outline, 32 + focal * part + outline), abs=1
        )


@pytest.mark.parametrize("euler", ["90 0 0", "180 0 0", "-90 0 0", "0 0 90", "0 0 -90"])
def test_every_side_of_a_box_can_be_the_near_one(euler):
    picture = flat([("0 0 1", f"type='box' size='0.5 0.5 0.5' euler='{euler}'", "1 0 0")])
    assert (picture[19:45, 19:45] == [255, 0, 0]).all()


def test_a_box_shows_its_near_face_alone_whatever_the_order_of_faces(monkeypatch):
    box = [("0 0 1", "type='box' size='0.5 0.5 0.5'", "1 0 0")]
    picture = flat(box)
    assert (picture[20:44, 20:44] == [255, 0, 0]).all()  # no edges of the far one
    assert (picture[:, :, 0] - picture[:, :, 2] > 100).sum() > 24 * 24
    monkeypatch.setattr(painters, "_FACES", painters._FACES[::-1])
    np.testing.assert_array_equal(flat(box), picture)


@pytest.mark.parametrize(
    ("picture", "told"),
    [
        (None, "returned object of shape ()"),
        (np.zeros((2, 3), np.uint8), "returned uint8 of shape (2, 3)"),
        (np.zeros((2, 3, 4), np.uint8), "returned uint8 of shape (2, 3, 4)"),
        (np.zeros((2, 3, 3)), "returned float64 of shape (2, 3, 3)"),
        (OSError("no screen"), "raised no screen"),
        (np.zeros((2, 3, 3), np.uint8), None),
    ],
)
def test_an_environment_that_draws_itself_gives_a_picture(picture, told):
    class Drawing:
        @property
        def unwrapped(self):
            return self

        def render(self):
            if isinstance(picture, Exception):
                raise picture
            return picture

    painter = painters.painter_of(Drawing(), (8, 8))
    if told is None:
        assert painter.draw() is picture
        return
    with pytest.raises(UsageError, match=re.escape(f"Drawing.render {told}")):
        painter.draw()


@pytest.mark.parametrize(
    ("inside", "kind"),
    [
        ("<joint type='hinge'/>", mujoco.mjtCamera.mjCAMERA_FREE),
        ("<freejoint/>", mujoco.mjtCamera.mjCAMERA_TRACKING),
        ("<freejoint/><camera name='track'/>", mujoco.mjtCamera.mjCAMERA_FIXED),
        ("", mujoco.mjtCamera.mjCAMERA_FREE),
    ],
)
def test_the_camera_is_the_models_own_or_follows_what_moves_freely(inside, kind):
    body = f"<body name='other'/><body>{inside}<geom size='1'/></body>"
    camera = _camera(mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{body}</worldbody></mujoco>"))
    assert camera.type == kind
    assert (camera.trackbodyid == 2) == (kind == mujoco.mjtCamera.mjCAMERA_TRACKING)


@pytest.mark.parametrize(
    ("name", "ends", "least", "high"),
    [
        ("half-cheetah-dir", [[-6.5, 0, 0.7], [0.3, 0, 0.5]], 0.7, (6.8 + 2) * 240 / 320),
        ("ant-dir", [[-1, -2, 0.5], [1, 3, 0.8]], 0.3, 5 + 2),
        ("ant-dir", [[0, 0, 0.5], [0, 0, 0.5]], 0, 3),
    ],
)
def test_one_camera_shows_the_whole_way_of_a_robot(name, ends, least, high):
    model, size = drawable(EnvConfig(name=name)).unwrapped.model, (320, 240)
    scene = mujoco.MjvScene(model=model, maxgeom=1000)
    camera, every = camera_of_way(model, np.array(ends), size), mujoco.mjtCatBit.mjCAT_ALL
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    mujoco.mjv_updateScene(model, data, mujoco.MjvOption(), None, camera, every, scene)
    shares = np.array(_View(scene.camera, *size).pixels(np.array(ends))) / size
    assert ((shares > 0.05) & (shares < 0.95)).all()
    assert np.abs(shares[0] - shares[1]).max() >= least
    assert camera.azimuth == 90  # both ends of a track are as far away
    assert 2 * camera.distance * np.tan(np.radians(22.5)) == pytest.approx(high)  # meters from top to bottom


def test_a_robot_that_runs_far_is_followed_and_one_that_moves_nowhere_has_no_position():
    env = drawable(EnvConfig(name="half-cheetah-dir"))
    for end, kind in ((16, mujoco.mjtCamera.mjCAMERA_FREE), (16.1, mujoco.mjtCamera.mjCAMERA_FIXED)):
        camera = camera_of_way(env.unwrapped.model, np.array([[0, 0, 0.5], [end, 0, 0.5]]), (320, 240))
        assert camera.type == kind
    env.reset(seed=0)
    before = position_of(env)()
    env.unwrapped.data.qpos[0] += 2
    mujoco.mj_forward(env.unwrapped.model, env.unwrapped.data)
    np.testing.assert_allclose(position_of(env)() - before, [2, 0, 0])
    assert position_of(drawable(EnvConfig(name="InvertedPendulum-v5"))) is None
    ant = drawable(EnvConfig(name="ant-dir"))
    ant.reset(seed=0)
    np.testing.assert_allclose(position_of(ant)(), ant.unwrapped.data.qpos[:3])


def test_pictures_of_a_point_show_its_whole_way():
    env = drawable(EnvConfig(name="point-corner"))
    env.reset(seed=0)
    assert position_of(env)().shape == (2,)
    for ends, reach in (([[0, 0], [1, -2]], 2.5), ([[0, 0], [1, -4]], 4.2)):
        painter_of(env, (320, 240), way=np.array(ends))
        assert env.unwrapped.reach == reach


def test_captions_of_a_robot_say_how_far_it_has_moved(robot, tmp_path, monkeypatch):
    captions = []
    monkeypatch.setattr(commands_video, "write_film", lambda frames, *_: captions.extend(frames))
    assert metaloom.video(robot, tmp_path / "film.gif", renderer="flat").agrees
    x = [[float(panel.below.split()[3]) for panel in panels] for panels in captions]
    assert x[0] == [0, 0]
    assert all(panel.below.startswith(f"step {t}   ") for t, panels in enumerate(captions) for panel in panels)


def test_captions_say_how_far_and_what_was_earned_so_far(monkeypatch):
    places = iter([[0.3, 1], [0.26, 2], [1.52, 3]])
    monkeypatch.setattr(commands_video, "position_of", lambda env: lambda: next(places))
    recording = SimpleNamespace(
        rewards=np.array([1.0, 2.0]),
        length=2,
        when="episode",
        simulate=lambda env: iter([0.0, 0.5, 0.0]),
        facts_text=lambda env, t: "",
    )
    differences = []
    panels = [*commands_video._panels(recording, None, SimpleNamespace(draw=lambda: None), 1, differences)]
    assert differences == [0, 0.5, 0]
    assert {panel.above for panel in panels} == {"episode: return 3.00"}
    assert [panel.below for panel in panels] == [
        "step 0   x +0.0 m   reward so far 0.00",
        "step 1   x +0.0 m   reward so far 1.00",
        "step 2   x +1.2 m   reward so far 3.00",
    ]


def test_flat_drawing_covers_what_opengl_draws(tmp_path):
    if opengl.problem_with("egl") is not None:
        pytest.skip("EGL does not work here")
    env = drawable(EnvConfig(name="half-cheetah-dir"))
    env.reset(seed=0)
    flat = painter_of(env, (320, 240), "flat").draw().astype(int)
    script = (
        "import sys, numpy as np\n"
        "from metaloom.flows.films.opengl import choose_renderer\n"
        "assert choose_renderer('egl') == 'egl'\n"
        "from metaloom.flows.films.painters import drawable, painter_of\n"
        "from metaloom.pipeline.envs.config import EnvConfig\n"
        "env = drawable(EnvConfig(name='half-cheetah-dir'))\n"
        "env.reset(seed=0)\n"
        "np.save(sys.argv[1], painter_of(env, (320, 240), 'egl').draw())\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "gl.npy")], check=True)
    drawn = np.load(tmp_path / "gl.npy").astype(int)

    def is_robot(picture):  # its colors are warm; sky and ground are gray, green or blue
        return (picture[..., 0] > 1.15 * picture[..., 2]) & (picture[..., 0] > 20)

    both, either = (is_robot(flat) & is_robot(drawn)).sum(), (is_robot(flat) | is_robot(drawn)).sum()
    assert both / either > 0.8


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"task": 3}, "task must be an index from 0 to 2, best or worst, got 3"),
        ({"task": 3, "size": "16x4096"}, "task must be an index from 0 to 2, best or worst, got 3"),
        ({"episode": 2}, "task 0 has no episode 2; choose one from 0 to 1"),
        ({"task": 1, "best": True}, "--task, --best and --worst are mutually exclusive"),
        ({"best": True, "worst": True}, "--task, --best and --worst are mutually exclusive"),
        ({"steps": [2]}, "inner step 2 is not stored; choose one of 0, 1"),
        ({"out": "film.mpg"}, "film.mpg: the suffix must be one of .gif"),
        ({"out": "nowhere/film.gif"}, "does not exist"),
    ],
)
def test_what_cannot_be_filmed_is_refused_and_leaves_nothing(points, tmp_path, options, told):
    options = {"out": "film.gif", **options}
    with pytest.raises(UsageError, match=told):
        metaloom.video(points, tmp_path / options.pop("out"), 1, **options)
    assert [*tmp_path.iterdir()] == []


def test_an_iteration_that_has_sampled_no_episode_yet_is_refused(points, tmp_path, monkeypatch):
    monkeypatch.setattr(storage.Run, "refs", lambda run: [StageRef(1, "sample_tasks")])
    with pytest.raises(storage.StageMissing, match="no episodes of iteration 1 are stored"):
        metaloom.video(points, tmp_path / "film.gif", 1)


def test_a_scene_with_another_model_is_drawn_by_another_painter_and_the_first_is_closed(monkeypatch):
    sites = [SimpleNamespace(name="hand", rgba="red"), SimpleNamespace(name="goal_near", rgba="red")]
    a, b = SimpleNamespace(nsite=2, site=sites.__getitem__), SimpleNamespace(nsite=0)
    closed, models = [], [a, a, b]

    def painter(model, *_):
        return SimpleNamespace(draw=lambda: model, close=lambda: closed.append(model))

    monkeypatch.setattr(painters, "_of_mujoco", painter)
    scene = painters._Scene(lambda: (models.pop(0), None, None), (8, 8), "flat")
    assert [scene.draw() for _ in range(3)] == [a, a, b]
    assert sites[0].rgba == "red"
    np.testing.assert_allclose(sites[1].rgba, np.array([60, 160, 75, 255]) / 255)
    assert closed == [a]
    scene.close()
    assert closed == [a, b]


def test_an_environment_without_pictures_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "hostile"))
    with pytest.raises(UsageError, match=r"render_modes \[\]\. For a video, it needs rgb_array"):
        drawable(EnvConfig(name="hostile_envs:Plain"))


def test_an_evaluation_that_could_not_be_filmed_is_refused_before_it_samples(points, tmp_path, monkeypatch, capsys):
    def no_pictures(env):
        raise UsageError(f"{env.name} has no pictures")

    monkeypatch.setattr(commands_video, "drawable", no_pictures)
    assert cli.run(["evaluate", str(points.path), "--video", str(tmp_path / "film.gif")]) == 2
    assert capsys.readouterr() == ("", "metaloom: point-corner has no pictures\n")


def test_an_mp4_without_the_package_that_writes_it_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ExtraMissing, match=r"^imageio with imageio-ffmpeg is not installed; .*metaloom\[video\]"):
        commands_video.check_film_file(tmp_path / "film.mp4")


def test_an_mp4_without_ffmpeg_is_refused(monkeypatch, tmp_path):
    def no_program():
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", no_program)
    with pytest.raises(UsageError, match="needs ffmpeg, which is not installed"):
        commands_video.check_film_file(tmp_path / "film.mp4")


def test_a_renderer_that_does_not_work_is_told_with_what_helps(monkeypatch):
    monkeypatch.setattr(opengl, "problem_with", lambda name: f"{name} is broken")
    monkeypatch.setattr("sys.modules", {k: v for k, v in sys.modules.items() if k != "mujoco"})
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    assert opengl.choose_renderer("auto") == "flat"
    with pytest.raises(UsageError, match=r"cannot use OpenGL through osmesa: osmesa is broken\. Install its libraries"):
        opengl.choose_renderer("osmesa")


@pytest.mark.parametrize(
    ("asked", "named", "late", "working", "chosen"),
    [
        ("auto", "", False, {"glfw", "osmesa"}, "glfw"),
        ("auto", "OSMesa", False, {"egl", "osmesa"}, "osmesa"),
        ("auto", "osmesa", False, {"egl"}, "flat"),
        ("egl", "osmesa", False, {"egl", "osmesa"}, "egl"),
        ("flat", "egl", False, {"egl"}, "flat"),
        ("auto", "osmesa", True, {"egl", "osmesa"}, "osmesa"),
        ("auto", "", True, {"egl"}, "flat"),
        ("osmesa", "osmesa", True, {"egl", "osmesa"}, "osmesa"),
        ("flat", "egl", True, {"egl"}, "flat"),
        ("egl", "osmesa", True, {"egl", "osmesa"}, "cannot use the egl renderer: MuJoCo was imported with MUJOCO_GL="),
        ("osmesa", "osmesa", True, {"egl"}, "cannot use OpenGL through osmesa: broken"),
    ],
)
def test_the_renderer_is_the_one_asked_for_or_the_one_that_mujoco_uses_or_the_first_that_works(
    asked, named, late, working, chosen, monkeypatch
):
    monkeypatch.setattr(opengl, "problem_with", lambda name: None if name in working else "broken")
    if not late:
        monkeypatch.setattr("sys.modules", {k: v for k, v in sys.modules.items() if k != "mujoco"})
    monkeypatch.setenv("MUJOCO_GL", named)
    if chosen.startswith("cannot"):
        with pytest.raises(UsageError, match=chosen):
            opengl.choose_renderer(asked)
        return
    assert opengl.choose_renderer(asked) == chosen
    assert os.environ["MUJOCO_GL"] == (named if chosen == "flat" else chosen)


@pytest.mark.parametrize("name", ["DISPLAY", "WAYLAND_DISPLAY", None])
def test_a_window_is_tried_where_there_is_a_screen_of_either_kind(name, monkeypatch):
    tried, ended = [], SimpleNamespace(returncode=0)
    monkeypatch.setattr(opengl.subprocess, "run", lambda command, **options: tried.append(options["env"]) or ended)
    for variable in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(variable, raising=False)
    if name is not None:
        monkeypatch.setenv(name, ":0")
    monkeypatch.setenv("PYOPENGL_PLATFORM", "osmesa")
    problem = opengl.problem_with.__wrapped__("glfw")
    assert problem == (None if name else "there is no display (DISPLAY and WAYLAND_DISPLAY are not set)")
    shown = [(env[name], env["MUJOCO_GL"], env.get("PYOPENGL_PLATFORM")) for env in tried]
    assert shown == ([(":0", "glfw", None)] if name else [])
    ended.returncode = 7
    for ended.stderr, message in (("a\n no screen\n", " no screen"), ("", "its process ended with exit code 7")):
        assert opengl.problem_with.__wrapped__("egl") == message


@pytest.mark.parametrize("size", ["480", "15x360", "480x", "4097x100", "axb"])
def test_a_size_that_is_none_is_refused(points, size, capsys):
    assert cli.run(["video", str(points.path), "--out", "film.gif", "--size", size]) == 2
    assert f"--size {size}" in capsys.readouterr().err


def test_an_evaluation_films_the_test_episodes_that_it_measured(points, tmp_path, capsys):
    out = tmp_path / "test.gif"
    words = ["evaluate", str(points.path), "--num-tasks", "3", "--adaptation-steps", "2", "--test-episodes", "3"]
    assert cli.run([*words, "--workers", "0", "--video", str(out)]) == 0
    told = capsys.readouterr().out
    measured = metaloom.evaluate(points, num_tasks=3, adaptation_steps=2, test_episodes=3).evaluation
    after = measured.test_returns[:, -1].mean(axis=1)
    b = int(np.argsort(after)[1])
    before, after = (np.median(measured.test_returns[b, k]) for k in (0, 2))
    assert re.search(
        rf"7 frames, task {b}, return {before:.2f} before adaptation \(episode \d\), "
        rf"{after:.2f} after 2 steps of adaptation \(episode \d\)\n",
        told,
    )
    assert "largest difference 0" in told
    assert len(pictures(out)) == 7
    assert pictures(out)[0].shape[1] > 2 * 300  # two panels


def test_an_evaluation_without_adaptation_films_one_episode_and_a_bad_file_is_refused_first(points, tmp_path, capsys):
    words = ["evaluate", str(points.path), "--workers", "0", "--num-tasks", "1", "--adaptation-steps", "0", "--video"]
    assert cli.run([*words, str(tmp_path / "test.png")]) == 0
    assert re.search(r"return \S+ episode \(episode \d\)", capsys.readouterr().out)
    assert cli.run([*words, str(tmp_path / "test.avi")]) == 2
    assert "--video" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "name"), [("--video", "film.gif"), ("--plot", "curve.png")])
def test_an_evaluation_is_told_even_if_its_pictures_cannot_be_written(
    points, tmp_path, capsys, monkeypatch, option, name
):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(commands_video, "_write_animation", full)
    monkeypatch.setattr(Path, "write_bytes", full)
    words = ["evaluate", str(points.path), "--workers", "0", "--num-tasks", "1", "--test-episodes", "1", "--json"]
    assert cli.run([*words, option, str(tmp_path / name)]) == 1
    out, err = capsys.readouterr()
    assert len(json.loads(out)["adaptation"]) == 2
    assert err.count("\n") == 1
    assert "No space left on device; this needs free space and permission to write" in err
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("option", "name"), [("--video", "film.gif"), ("--plot", "curve.png")])
def test_a_folder_is_no_file_for_a_picture(points, tmp_path, capsys, option, name):
    (tmp_path / name).mkdir()
    assert cli.run(["evaluate", str(points.path), "--workers", "0", option, str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert name in err


def test_each_side_of_a_test_film_says_after_how_many_steps_of_adaptation_it_is(tmp_path, monkeypatch):
    sizes = {"num_tasks": 2, "max_episode_steps": 3, "iterations": 1}
    run = metaloom.train(
        "rl2-point-corner", tmp_path / "remembers", **sizes, policy={"hidden_sizes": [4]}, progress=False
    )
    captions, whole = [], []

    def keep(frames, _, fps, caption):
        captions.extend(panel.above.partition(":")[0] for panel in next(iter(frames)))
        whole.append(caption)

    monkeypatch.setattr(commands_video, "write_film", keep)
    words = ["--num-tasks", "1", "--test-episodes", "1", "--video", str(tmp_path / "film.gif")]
    assert cli.run(["evaluate", str(run.path), "--workers", "0", *words]) == 0
    assert captions == ["before adaptation", "after 1 step of adaptation"]
    (caption,) = whole
    assert re.fullmatch(
        r"remembers after 1 update, test task 0 \(goal_x -?[\d.]+, goal_y -?[\d.]+\), median-return task and episodes",
        caption,
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, ""), (1, " (p0 1.33)"), (6, " (p0 1.33, p1 2.33, p2 3.33, p3 4.33, p4 5.33, p5 6.33)"), (7, "")],
)
def test_a_caption_gives_the_parameters_of_a_task_if_they_are_few(count, text):
    params = np.stack([np.zeros(count), np.arange(count) + 4 / 3])
    tasks = TaskBatch(params, np.full(2, -1), tuple(f"p{n}" for n in range(count)), ("1",) * count)
    assert commands_video.described(tasks, 1) == text


def test_a_policy_that_remembers_is_shown_in_the_first_and_last_episode_of_its_trial_of_median_return(
    tmp_path, monkeypatch
):
    sizes = {"num_tasks": 2, "episodes_per_task": 6, "max_episode_steps": 3, "iterations": 1}
    algorithm = {"episodes_per_trial": 2, "trials_per_minibatch": 3}
    run = metaloom.train("rl2-point-corner", tmp_path / "remembers", **sizes, algorithm=algorithm, **SMALL)
    monkeypatch.setattr(commands_video, "write_film", lambda frames, *_: [*frames])
    done = metaloom.video(run, tmp_path / "film.gif", task=1)
    trials = run[0].rollouts(0).rewards[1].sum(-1, dtype=float).reshape(2, 3).sum(0)
    middle = np.argsort(trials)[1]
    assert done.agrees
    assert done.episodes == {"first episode of a trial": middle, "episode 2 of the trial": 3 + middle}


@pytest.mark.parametrize("recipe", ["promp-hidden-goal-grid", "promp-bandit", "promp-tabular-mdp"])
def test_small_worlds_are_filmed_and_every_step_changes_the_picture(recipe, tmp_path):
    run = metaloom.train(recipe, tmp_path / "run", **ROBOT, **SMALL)
    done = metaloom.video(run, tmp_path / "film.webp")
    assert done.agrees
    assert all((a != b).any() for a, b in pairwise(pictures(done.path)))


def test_a_chart_of_arms_shows_their_means_the_best_and_how_often_each_was_pulled():
    means = np.array([[0.25, 0.5, 1.0]])
    chart = table_picture(means, np.array([[0, 10, 5]]))

    def height(slot, color):
        third = chart[:, 4 + slot * 104 : 4 + (slot + 1) * 104].astype(int)
        return np.abs(third - color).sum(-1).min(axis=1).tolist().count(0)

    gray, green, blue = (205, 205, 205), (60, 160, 75), (25, 60, 150)
    assert [height(slot, gray) for slot in range(3)] == [pytest.approx(78, abs=2), pytest.approx(155, abs=2), 0]
    assert height(2, green) == pytest.approx(309, abs=2)
    assert [height(slot, blue) for slot in range(3)] == [1, pytest.approx(309, abs=2), pytest.approx(155, abs=2)]


def test_captions_tell_the_first_success_and_distances(tmp_path, monkeypatch):
    env = {"options": {"reward": "dense", "success_radius": 2.75}}
    run = metaloom.train("promp-point-corner", tmp_path / "run", env=env, **POINTS, **SMALL)
    captions = []
    monkeypatch.setattr(commands_video, "write_film", lambda frames, *_: captions.extend(frames))
    metaloom.video(run, tmp_path / "film.gif", 1, task=2, episode=1)
    facts = run[1].rollouts(0).facts
    for t, panels in enumerate(captions):
        steps = 1 + np.flatnonzero(facts["success"][2, 1, :t])
        told = f"success at step {steps[0]}   " if len(steps) else ""
        told += f"goal distance {facts['goal_distance'][2, 1, t - 1]:.2f} m   " if t else ""
        assert f" m   {told}reward so far" in panels[0].below


@pytest.mark.parametrize(
    ("name", "task", "place"),
    [
        ("half-cheetah-dir", [-1], [-2.5, 0.1, 1.2]),
        ("half-cheetah-vel", [2], [0.5 + 2 * 1.5, 0.1, 1.2]),
        ("ant-dir-2d", [0.6, 0.8], [0.5 + 1.8, 0.1 + 2.4, 1.2]),
        ("ant-goal", [1, 2], [1, 2, 1.2]),
        ("hopper-rand-params", None, None),
    ],
)
def test_the_goal_of_a_robot_is_a_green_ball(name, task, place):
    env = drawable(EnvConfig(name=name))
    env.reset(seed=0)
    way = np.array([[0.5, 0.1, 0.6], [2, 0.1, 0.6], [3.5, 0.1, 0.9]])
    if task is None:
        assert goal_of(env, way) is None
        return
    env.set_task(np.array(task, float))
    env.unwrapped.data.time = 1.5
    goal = goal_of(env, way)
    np.testing.assert_allclose(goal(), place)
    shown = [painter_of(env, (320, 240), "flat", np.array([*way, goal()]), g).draw() for g in (None, goal)]
    rows, columns = np.nonzero((shown[0] != shown[1]).any(-1))
    assert len(rows) > 5
    assert (np.abs(shown[1][rows, columns].astype(int) - (60, 160, 75)).sum(-1) < 60).any()


@pytest.mark.parametrize(("torso", "height"), [(0.1, 0.7), (0.6, 1.2), (1.25, 1.35), (1.4, 1.4)])
def test_a_goal_is_above_low_robots_and_not_above_the_heads_of_tall_ones(torso, height):
    env = drawable(EnvConfig(name="walker2d-dir"))
    env.reset(seed=0)
    goal = goal_of(env, np.array([[0, 0, torso], [1, 0, torso]]))
    assert goal is not None
    assert goal()[2] == pytest.approx(height)


def test_captions_have_room_beside_small_pictures():
    small = np.arange(2 * 90 * 3, dtype=np.uint8).reshape(2, 90, 3)
    shown = np.asarray(commands_video.compose([commands_video.FramePanel(small, "", "")] * 2, ""))
    # 2 x 90 pixels are enlarged three times, to 540: twice would be 360, and captions need 400.
    assert shown.shape == (2 * 3 + 3 * 26, 2 * 270 + 4, 3)
    assert (shown[52:58:3, 0:270:3] == small).all()
    assert (shown[52:58:3, 274:544:3] == small).all()
    assert (shown[:52] == 255).all()
    wide = np.zeros((2, 400, 3), np.uint8)
    assert commands_video.compose([commands_video.FramePanel(wide, "", "")], "").width == 400
    odd = np.zeros((3, 401, 3), np.uint8)
    assert commands_video.compose([commands_video.FramePanel(odd, "", "")], "").size == (402, 3 + 3 * 26 + 1)


def test_captions_are_in_the_middle_of_their_bars():
    panels = [commands_video.FramePanel(np.full((4, 400, 3), 255, np.uint8), text, text) for text in ("H", "HOH")]
    shown = np.asarray(commands_video.compose(panels, "HOOOH"))
    for left, width, top in ((0, 804, 0), (0, 400, 26), (404, 400, 26), (0, 400, 56), (404, 400, 56)):
        ink = (shown[top : top + 26, left : left + width] < 128).all(-1)
        rows, columns = np.nonzero(ink)
        assert (columns.min() + columns.max() + 1) / 2 == pytest.approx(width / 2, abs=1)
        assert (rows.min() + rows.max() + 1) / 2 == pytest.approx(13, abs=2)
    assert shown.min() == 30


@pytest.mark.parametrize("size", [15, 13, 11, 9])
def test_a_caption_is_in_the_largest_font_that_fits(size):
    font = ImageFont.load_default(size)
    text = "em" * int(392 // font.getlength("em"))  # 4 pixels are free on each side
    shown = commands_video.compose([commands_video.FramePanel(np.full((2, 400, 3), 255, np.uint8), "", "")], text)
    expected = Image.new("RGB", shown.size, (255, 255, 255))
    ImageDraw.Draw(expected).text((200, 13), text, fill=(30, 30, 30), font=font, anchor="mm")
    np.testing.assert_array_equal(np.asarray(shown), np.asarray(expected))
