"""Acting with given parameters outside of rollouts, one step at a time."""

from threading import RLock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from metaloom.flows.errors import UsageError
from metaloom.flows.runs import check_seed
from metaloom.flows.trained.blueprint import Blueprint
from metaloom.pipeline.algorithms.off_policy.parts import log_slope
from metaloom.pipeline.envs.contract import EnvError
from metaloom.pipeline.nn.distributions import Categorical, Distribution
from metaloom.pipeline.policies.acting import check_actor_params, make_actor
from metaloom.pipeline.policies.actors import Actor, ActorSetup
from metaloom.pipeline.policies.actors.off_policy import EPSILON
from metaloom.pipeline.policies.build import RecurrentPolicy, build_policy
from metaloom.pipeline.policies.posterior import without_posterior
from metaloom.pipeline.policies.remembering import Memory
from metaloom.pipeline.seeding import generator
from metaloom.pipeline.types import Array, TaskParams

DRAWN_AHEAD = 32  # number of steps whose noise is drawn at once, since an actor draws its noise before its first step


class Acting:
    """Acts step by step in B tasks. Calls from several threads are serialized.

    Raises:
        UsageError: the seed is invalid; also raised by `reset`.
        ValueError: the parameters are incompatible with the policy.
    """

    def __init__(self, blueprint: Blueprint, params: TaskParams, seed: int) -> None:
        config = blueprint.config
        check_actor_params(config.algorithm.actor, config.policy, params.params, blueprint.spaces)
        self.num_tasks: int = len(next(iter(params.params.values())))  # B
        self.seed = check_seed(seed)  # determines all random draws together with the episode and step
        self.blueprint: Blueprint = blueprint  # description from which the policy is built
        self._params = params
        self._episode = 0
        self._actors: dict[tuple[int, bool], _Steps] = {}
        # For a policy with a memory: the actor that acted last, and whether `observe` must be called next.
        self._last: _Steps | None = None
        self._awaits = False
        # Serializes calls, since each one overwrites the actor's arrays.
        self._turn = RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_turn"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _turn=RLock())

    def reset(self, *, seed: int | None = None) -> None:
        """Begin an episode; a policy that infers its task draws a new latent variable.

        A policy with a memory begins a trial with the memory from its adaptation, if any. Until the next reset, the
        memory persists across episodes, whose ends are reported through `observe`.

        Args:
            seed: Seed with which to restart; None continues the sequence of episodes.
        """
        seed = None if seed is None else check_seed(seed)
        with self._turn:
            self._episode = self._episode + 1 if seed is None else 0
            self.seed: int = self.seed if seed is None else seed
            self._actors.clear()
            self._last, self._awaits = None, False

    def act(self, observations: Any, *, deterministic: bool = True) -> Array:
        """Return actions as stored in batches, before they are mapped to the environment's action space.

        Args:
            observations: A single observation, either as the environment returns it (e.g. a dict) or flattened; or an
                array with any leading axes, flattened unless the space is a Box. With B > 1 tasks, B is the first axis.
            deterministic: True returns the most likely actions; False samples actions as in training.

        Returns:
            Actions, [A] float32 or a single int64, with the leading axes of the observations.
        """
        rows, leading = self._rows(observations)
        with self._turn:
            steps = self._steps(rows.shape[1], deterministic)
            self._go_on(steps)
            actions = steps.act(rows)
            self._awaits = self.blueprint.config.algorithm.trial is not None
            self._last = steps if self._awaits else None
            return np.array(actions.reshape((*leading, *actions.shape[1:])))

    def observe(self, rewards: Array | float, ended: Array | bool) -> None:
        """Report the rewards for the last actions. Policies with a memory require this call after every step.

        If the memory only lasts for an episode, as in recurrent PPO, it is reset when the episode ends.

        Args:
            rewards: Rewards for the last actions, with their leading axes; a scalar for a single observation.
            ended: True if the episode terminated or was truncated; the next observation then comes from a reset.

        Raises:
            UsageError: the policy has no memory, or has not acted since the last call.
            ValueError: the number of rewards differs from the number of actions, or a reward is not finite.
        """
        algorithm = self.blueprint.config.algorithm
        if algorithm.trial is None:
            raise UsageError(f"the policy of {algorithm.name} has no memory; do not call `observe`")
        with self._turn:
            if not self._awaits or self._last is None:
                raise UsageError("got rewards without new actions; call `policy(observations)` before `observe`")
            actor = self._last.actor
            num_rows = actor.actions.shape[1]
            with np.errstate(over="ignore"):
                earned = np.asarray(rewards, np.float32).reshape(-1)
            flags = np.asarray(ended, np.bool_).reshape(-1)
            if (len(earned), len(flags)) != (num_rows, num_rows) or not np.isfinite(earned).all():
                raise ValueError(
                    f"got {np.asarray(rewards)} and {np.asarray(ended)} for {num_rows} actions; pass a finite "
                    "reward for each, and True where it ended the episode"
                )
            actor.learn_of(np.arange(num_rows), earned, flags)
            if not algorithm.adapts:
                # The memory lasts for one episode: reset rows [N] whose episodes have ended.
                memory, goes_on = actor.memory, ~flags[None, :, None]
                if memory is not None:
                    actor.recall(Memory(np.where(goes_on, memory.state, 0), np.where(goes_on, memory.last, 0)))
            self._awaits = False

    def log_prob(self, observations: Any, actions: Array) -> Array:
        """Return the log-density of actions, or the log-probability if they are discrete, summed over dimensions.

        Args:
            observations: Observations, as for `act`.
            actions: Actions as returned by `act` and stored in batches.

        Returns:
            Log-densities, float32, with the leading axes of the observations.
        """
        rows, leading = self._rows(observations)
        num_actions, action_size = self.blueprint.spaces.num_actions, self.blueprint.spaces.action_size
        own = () if num_actions else (action_size,)
        if np.shape(actions) != (*leading, *own):
            raise ValueError(f"got actions of shape {np.shape(actions)}; expected {(*leading, *own)}")
        taken, required = np.asarray(actions), "finite numbers"
        fit = np.isfinite(taken)
        if num_actions:
            required = f"integers from 0 to {num_actions - 1}, as `act` returns them"
            fit &= (taken >= 0) & (taken < num_actions) & (np.floor(taken) == taken)
        if not fit.all():
            raise ValueError(f"got the action {taken[~fit].flat[0]}; expected {required}")
        dtype = torch.int64 if num_actions else torch.float32
        with self._turn:
            found = self._distribution(rows).log_prob(torch.as_tensor(taken).to(dtype).reshape(*rows.shape[:2], *own))
            return found.float().expand(rows.shape[:2]).numpy().reshape(leading)

    @property
    def _recorded(self) -> set[str]:
        """Names of the arrays that this kind of policy records in `EpisodeBatch.behavior`."""
        spaces, position = self.blueprint.spaces, (self.seed, self._episode)
        steps = _Steps(self.blueprint, self._params, position, 1, deterministic=True)
        # A custom policy's arrays are only known once it has acted.
        steps.act(np.zeros((self.num_tasks, 1, spaces.observation_size), np.float32))
        return {*steps.actor.behavior_by_step, *steps.actor.behavior_by_task}

    def _go_on(self, steps: "_Steps") -> None:
        """Hand over the memory to `steps` before it acts, since another actor of this policy may have acted last."""
        if self._last is None:
            return
        if self._awaits:
            raise UsageError(
                "the policy's memory has not received the rewards of its last actions; call "
                "`policy.observe(reward, ended)` after every step, or `policy.reset()` to begin a trial"
            )
        memory = self._last.actor.memory
        if memory is None or self._last is steps:
            return
        if (found := steps.actor.actions.shape[1]) != (kept := self._last.actor.actions.shape[1]):
            raise UsageError(
                f"got {found} observations for a policy that remembers {kept}; pass the same number as in "
                "earlier steps, or call `policy.reset()` to begin a trial"
            )
        steps.actor.recall(memory)

    def _distribution(self, rows: Array) -> "TanhGaussian | Distribution":
        steps = self._steps(rows.shape[1], deterministic=True)
        self._go_on(steps)
        actor, memory = steps.actor, steps.actor.memory
        actor.act(0, rows.reshape(-1, rows.shape[-1]), np.arange(rows.shape[0] * rows.shape[1]))
        if memory is not None:
            # Computing probabilities must not change the memory.
            actor.recall(memory)
        found = {
            name: torch.as_tensor(value[0].reshape(*rows.shape[:2], *value.shape[2:]))
            for name, value in actor.behavior_by_step.items()
        }
        match self.blueprint.config.algorithm.actor:
            case "tanh_gaussian":
                return TanhGaussian(**found)
            case "q_values":
                # Actions are ε-greedy in training, but the actor used here is greedy.
                return epsilon_greedy(found["action_values"], torch.tensor(self._params.params[EPSILON]))
            case kind:
                by_task = {name: torch.as_tensor(v)[:, None] for name, v in actor.behavior_by_task.items()}
                config, spaces = self.blueprint.config.policy, self.blueprint.spaces
                policy = RecurrentPolicy(spaces, config) if kind == "recurrent" else build_policy(config, spaces)
                return policy.recorded(without_posterior({**found, **by_task}))

    @property
    def latent(self) -> Array | None:
        """Latent variable of each task in this episode, [B, Z] float32; None if the policy does not infer tasks."""
        with self._turn:
            found = self._steps(1, deterministic=True).actor.behavior_by_task.get("latent")
            return None if found is None else found[:, 0].copy()

    def _rows(self, observations: Any) -> tuple[Array, tuple[int, ...]]:
        """Return the observations as [B, N, O] float32, and their leading axes."""
        spaces = self.blueprint.spaces
        tasks = () if self.num_tasks == 1 else (self.num_tasks,)
        required = ", ".join(map(str, (*tasks, "...", *spaces.observation_shape)))
        try:
            with np.errstate(over="ignore"):
                found = np.asarray(self.blueprint.flattened(observations), np.float32)
        except EnvError:
            raise
        except (TypeError, ValueError):
            raise ValueError(
                f"got {observations!r:.100} as the observation; expected numbers of shape ({required}), the vector "
                f"that gymnasium.spaces.utils.flatten makes of the observations in {self.blueprint.config.env.name}"
            ) from None
        if not np.isfinite(found).all():
            raise ValueError("observations must be finite numbers within the range of float32")
        # Observations in batches are flattened.
        for shape in (spaces.observation_shape, (spaces.observation_size,)):
            leading = found.shape[: found.ndim - len(shape)]
            if found.shape[len(leading) :] == shape and leading[: len(tasks)] == tasks and 0 not in leading:
                return found.reshape(self.num_tasks, -1, spaces.observation_size), leading
        hint = "" if found.ndim else "; encode discrete observations as one-hot vectors"
        raise ValueError(f"got observations of shape {found.shape}; expected ({required}){hint}")

    def _steps(self, num_rows: int, deterministic: bool) -> "_Steps":
        key, position = (num_rows, deterministic), (self.seed, self._episode)
        if key not in self._actors:
            if deterministic:
                # These actors do not count steps, so one works for any number of rows.
                self._actors = {other: steps for other, steps in self._actors.items() if not other[1]}
            self._actors[key] = _Steps(self.blueprint, self._params, position, num_rows, deterministic)
        return self._actors[key]


class _Steps:
    """Actor for the steps of an episode in B tasks x N rows."""

    def __init__(
        self, blueprint: Blueprint, params: TaskParams, position: tuple[int, int], num_rows: int, deterministic: bool
    ) -> None:
        self._blueprint, self._params, self._position = blueprint, params, position
        self._num_rows, self._deterministic = num_rows, deterministic
        self._t = 0
        self.actor = self._begin(0, None)

    def __getstate__(self) -> dict[str, Any]:
        # An actor's arrays share memory, which would be lost in copies and pickles.
        state = {name: value for name, value in self.__dict__.items() if name != "actor"}
        return {**state, "memory": self.actor.memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        memory = state.pop("memory")
        self.__dict__.update(state)
        # The actor's draws depend only on its position.
        self.actor = self._begin(self._t // DRAWN_AHEAD, memory)

    def act(self, rows: Array) -> Array:
        block, t = divmod(self._t, DRAWN_AHEAD)
        if block and not t:
            self.actor = self._begin(block, self.actor.memory)
        observations = rows.reshape(-1, rows.shape[-1])
        actions = self.actor.act(t, observations, np.arange(len(observations)))
        # A deterministic actor stays at its first step, since it draws nothing.
        self._t += not self._deterministic
        return actions

    def _begin(self, block: int, memory: Memory | None) -> Actor:
        (seed, episode), spaces = self._position, self._blueprint.spaces
        B = len(next(iter(self._params.params.values())))
        steps, rngs = 1, None
        if not self._deterministic:
            steps, rngs = DRAWN_AHEAD, [generator(seed, "actions", episode, block, b, self._num_rows) for b in range(B)]
        setup = ActorSetup(
            self._blueprint.config.policy,
            self._params,
            np.zeros((steps, B * self._num_rows, spaces.action_size or 1), np.float32),
            num_rows=self._num_rows,
            spaces=spaces,
            rngs=rngs,
            # All rows belong to one episode. For several episodes, use several policies or one episode after another.
            belief_rng=lambda b, e: generator(seed, "beliefs", episode, 0, b),
            memory=memory,
        )
        return make_actor(self._blueprint.config.algorithm.actor, setup)


class TanhGaussian(NamedTuple):
    """Distribution of a = tanh(u), u ~ N(mean, exp(log_stds)²); Haarnoja et al. 2018, arXiv:1801.01290, appendix C."""

    mean: Tensor
    log_stds: Tensor

    def log_prob(self, actions: Tensor) -> Tensor:
        """Return the log-densities, shape [...], of actions [..., A] in [-1, 1]; eq. 21."""
        # In float32, tanh(u) rounds to 1 for u > 9; use the smallest such u.
        largest = 1 - 2**-25
        u = actions.double().clamp(-largest, largest).atanh()
        gaussian = torch.distributions.Normal(self.mean.double(), self.log_stds.double().exp()).log_prob(u)
        return (gaussian - log_slope(u)).sum(-1)


def epsilon_greedy(values: Tensor, epsilon: Tensor) -> Categorical:
    """Return the ε-greedy distribution over n actions, from action values [B, N, n] and exploration rates [B]."""
    greedy = one_hot(values.argmax(-1), values.shape[-1])
    share = epsilon[:, None, None]
    return Categorical(((1 - share) * greedy + share / values.shape[-1]).log())
