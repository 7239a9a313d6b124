"""Whether the gripper holds an object, which takes contacts, and those a batch does not show."""
# pyright: reportAttributeAccessIssue=false
# MuJoCo's compiled modules have no type stubs.

import numpy as np

from metaloom.pipeline.envs.metaworld.oracle import OfficialClass
from metaloom.pipeline.envs.metaworld.physics import RowPhysics
from metaloom.pipeline.envs.metaworld.rows.shaping import norm
from metaloom.pipeline.types import Array


class Touch:
    """Looks at the contacts of rows of one class."""

    def __init__(self, official: OfficialClass, physics: RowPhysics) -> None:
        self._official, self._physics = official, physics
        geoms = [official.model.geom(name) for name in ("objGeom", "leftpad_geom", "rightpad_geom")]
        places = physics.batch.bind("geom_xpos")
        self._object, *self._pads = (places[:, geom.id] for geom in geoms)
        reaches = [float(geom.rbound[0] + geom.margin[0]) for geom in geoms]
        self._reaches = [reaches[0] + reach for reach in reaches[1:]]

    def of(self, asked: Array | float, rows: Array) -> Array:
        """[n] bool, where it is asked and both pads press on the object.

        The package looks at a row as it is, one at a time; of those rows only where the spheres around both pads meet
        that of the object, without which there is no contact.
        """
        touching = np.array(asked, np.bool_)
        candidates = np.flatnonzero(touching)
        for pad, reach in zip(self._pads, self._reaches, strict=True):
            near = norm(pad[rows[candidates]] - self._object[rows[candidates]]) <= reach
            candidates = candidates[near]
        touching[:] = False
        for place in candidates.tolist():
            self._physics.show(int(rows[place]))
            touching[place] = self._official.env.touching_main_object
        return touching
