"""Distributions that several robots draw their tasks from."""

import numpy as np

from metaloom.pipeline.types import Array


def draw_directions(num_tasks: int, rng: np.random.Generator) -> Array:
    """[num_tasks, 2], unit vectors, all directions equally likely: normalized Gaussians, as in ProMP."""
    vectors = rng.standard_normal((num_tasks, 2))
    return vectors / np.hypot(vectors[:, :1], vectors[:, 1:])


def draw_signs(num_tasks: int, rng: np.random.Generator) -> Array:
    """[num_tasks, 1], -1 or +1, equally likely."""
    return 2.0 * rng.integers(2, size=(num_tasks, 1)) - 1.0


def draw_on_disk(num_tasks: int, rng: np.random.Generator, *, radius: float) -> Array:
    """[num_tasks, 2], uniform on the disk around the origin."""
    angles, areas = rng.uniform(0, 2 * np.pi, num_tasks), rng.uniform(0, 1, num_tasks)
    return (radius * np.sqrt(areas) * np.stack([np.cos(angles), np.sin(angles)])).T
