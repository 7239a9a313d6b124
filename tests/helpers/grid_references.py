"""Computed references for the grid with a hidden goal: the best that any strategy can earn, and what simple ones do.

A trial is several episodes with the same goal. Until the goal is found every strategy walks a way that does not depend
on it; from then on it goes straight there and stays. A step on the goal gives 1 and any other -0.1, so a trial of L
steps earns L - 1.1 (steps off the goal), and a good search minimizes the mean of these steps over goals.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from metaloom.pipeline.envs.hidden_goal_grid import GOAL_REWARD, STEP_REWARD, Excluded, goals_of

Cell = tuple[int, int]
State = tuple[int, Cell, int]
"""Steps made, a cell, and in bits the goals that are left."""
Target = Callable[["GridTrials", Cell, frozenset[Cell]], Cell]
"""Where to go next, from a cell and the cells that were visited in the trial."""


@dataclass(frozen=True)
class GridTrials:
    """Trials on a grid.

    Attributes:
        size: Cells along a side.
        excluded: Cells that cannot be the goal.
        horizon: Steps of an episode.
        episodes: Episodes of a trial.
    """

    size: int = 5
    excluded: Excluded = "block"
    horizon: int = 15
    episodes: int = 4

    @cached_property
    def goals(self) -> list[Cell]:
        """Cells that can be the goal."""
        return goals_of(self.size, self.excluded)

    @property
    def num_steps(self) -> int:
        """Steps of a trial."""
        return self.horizon * self.episodes

    def return_of(self, steps_off_goals: int) -> float:
        """Return the mean return of a trial, from the steps off the goal, summed over all goals."""
        return self.num_steps * GOAL_REWARD - (GOAL_REWARD - STEP_REWARD) * steps_off_goals / len(self.goals)

    def later_steps(self, goal: Cell, episode: int) -> int:
        """Return the steps off a known goal in the episodes after this one."""
        return (self.episodes - 1 - episode) * (sum(goal) - 1)


def distance(a: Cell, b: Cell) -> int:
    """Return the number of moves between two cells."""
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def nearest_unvisited(trials: GridTrials, cell: Cell, visited: frozenset[Cell]) -> Cell:
    """Return the nearest cell that may be the goal; of several, the one of the lowest column, then row."""
    return min((g for g in trials.goals if g not in visited), key=lambda goal: (distance(goal, cell), goal))


def sweep(trials: GridTrials, cell: Cell, visited: frozenset[Cell]) -> Cell:
    """Sweep column by column, up one and down the next, also over cells that cannot be the goal."""
    n = trials.size
    way = [(x, y if x % 2 == 0 else n - 1 - y) for x in range(n) for y in range(n)]
    return next(place for place in way if place not in visited)


def strategy_return(trials: GridTrials, target: Target) -> float:
    """Return the mean return of a trial of a strategy that goes to one target after the other, columns first."""
    visited, off, missing, cell = {(0, 0)}, 0, set(trials.goals), (0, 0)
    for t in range(trials.num_steps):
        episode, within = divmod(t, trials.horizon)
        cell = cell if within else (0, 0)
        if missing:
            (x, y), (goal_x, goal_y) = cell, target(trials, cell, frozenset(visited))
            cell = (x + (1 if goal_x > x else -1), y) if x != goal_x else (x, y + (goal_y > y) - (goal_y < y))
        visited.add(cell)
        if cell in missing:
            missing.remove(cell)
            off += trials.later_steps(cell, episode)
        off += len(missing)
    return trials.return_of(off)


def bayes_optimal_return(trials: GridTrials) -> float:
    """Return the best strategy's mean return of a trial over goals.

    The belief is which cells were visited without success, so the best search is a shortest way over (step, cell, cells
    left), where a step is as long as goals are left. A* finds it: a goal that is left takes at least as many steps as
    it is away, and no two can be found in one step.
    """
    bits = {goal: 1 << n for n, goal in enumerate(trials.goals)}
    search = _Search(trials, bits)
    begin: State = (0, (0, 0), (1 << len(bits)) - 1)
    best: dict[State, int] = {begin: 0}
    queue: list[tuple[int, int, State]] = [(search.bound(*begin), 0, begin)]
    while queue:
        state = heapq.heappop(queue)[2]
        if not state[2] or state[0] == trials.num_steps:
            return trials.return_of(best[state])
        for after, length in search.steps(*state):
            found = best[state] + length
            if found < best.get(after, found + 1):
                best[after] = found
                heapq.heappush(queue, (found + search.bound(*after), -after[0], after))
    raise AssertionError("a trial has an end")


class _Search:
    def __init__(self, trials: GridTrials, bits: dict[Cell, int]) -> None:
        self._trials, self._bits = trials, bits

    def steps(self, t: int, cell: Cell, left: int) -> list[tuple[State, int]]:
        """Return states after a step, and how many steps off goals it adds, including later episodes."""
        episode, within = divmod(t, self._trials.horizon)
        last = within == self._trials.horizon - 1
        found: list[tuple[State, int]] = []
        x, y = cell
        for place in ((x, y), (x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
            if max(place) >= self._trials.size or min(place) < 0:
                continue
            bit = self._bits.get(place, 0) & left
            rest = left & ~bit
            length = rest.bit_count() + (self._trials.later_steps(place, episode) if bit else 0)
            found.append(((t + 1, (0, 0) if last else place, rest), length))
        return found

    def bound(self, t: int, cell: Cell, left: int) -> int:
        """Return a lower bound of the remaining steps."""
        episode, within = divmod(t, self._trials.horizon)
        if episode == self._trials.episodes:
            return 0
        room = self._trials.horizon - within
        goals = [goal for goal, bit in self._bits.items() if left & bit]
        away = sorted(distance(goal, cell) for goal in goals)
        at_least = (max(steps, rank) for rank, steps in enumerate(away, 1))
        # One that has to wait for the next episode takes what is left of this one, and saves the way there at most.
        now = sum(min(steps, room + 1) - 1 for steps in at_least)
        return now + sum(self._trials.later_steps(goal, episode) for goal in goals)
