import numpy as np
import pytest

from metaloom.pipeline.nn.natural_steps import conjugate_gradient, natural_step, search
from metaloom.pipeline.nn.optimization import NaturalSteps
from metaloom.pipeline.nn.optimizers import Adam, AdamInPlace, RMSpropInPlace


def minimize(adam, params, gradient_of, num_steps):
    state = adam.initialize(params)
    for _ in range(num_steps):
        params, state = adam.step(params, gradient_of(params), state)
    return params, state


def test_the_first_step_is_the_learning_rate_against_the_sign_of_the_gradient():
    # m / √v = (1 - β₁) g / √((1 - β₂) g²), which the correction √(1 - β₂) / (1 - β₁) turns into the sign of g.
    params = {"x": np.array([1.0, 1.0])}
    stepped, _ = minimize(Adam(0.1), params, lambda _: {"x": np.array([5.0, -0.01])}, 1)
    np.testing.assert_allclose(stepped["x"], [0.9, 1.1], rtol=1e-4)


def test_the_second_step_follows_the_formula_with_epsilon_outside_the_correction():
    adam, gradients = Adam(0.1, epsilon=0.5), [2.0, -1.0]
    params, state = {"x": np.array([0.0])}, adam.initialize({"x": np.array([0.0])})
    for gradient in gradients:
        params, state = adam.step(params, {"x": np.array([gradient])}, state)
    m1, v1 = 0.1 * 2.0, 0.001 * 4.0
    m2, v2 = 0.9 * m1 - 0.1, 0.999 * v1 + 0.001
    x = -0.1 * np.sqrt(1 - 0.999) / (1 - 0.9) * m1 / (np.sqrt(v1) + 0.5)
    x -= 0.1 * np.sqrt(1 - 0.999**2) / (1 - 0.9**2) * m2 / (np.sqrt(v2) + 0.5)
    np.testing.assert_allclose(params["x"], [x], rtol=1e-12)


def test_a_quadratic_is_minimized():
    params, _ = minimize(Adam(0.05), {"x": np.array([3.0, -2.0])}, lambda p: {"x": 2 * (p["x"] - 1)}, 500)
    np.testing.assert_allclose(params["x"], 1, atol=1e-3)


def test_inputs_are_left_alone_and_float32_stays_float32():
    adam, params = Adam(0.1), {"x": np.ones((2, 3), np.float32), "scalar": np.ones((), np.float32)}
    gradients = {name: np.full_like(value, 2) for name, value in params.items()}
    state = adam.initialize(params)
    for mapping in (params, gradients, state):
        for value in mapping.values():
            value.flags.writeable = False
    stepped, new_state = adam.step(params, gradients, state)
    assert all(value.dtype == np.float32 for value in stepped.values())
    assert {name: value.dtype for name, value in new_state.items()} == {n: v.dtype for n, v in state.items()}
    assert {name: value.shape for name, value in new_state.items()} == {n: v.shape for n, v in state.items()}
    assert all(isinstance(value, np.ndarray) for value in (*stepped.values(), *new_state.values()))


def test_parameters_without_a_gradient_are_passed_on():
    adam, params = Adam(0.1), {"learned": np.ones(2), "fixed": np.ones(2)}
    stepped, state = adam.step(params, {"learned": np.ones(2)}, adam.initialize({"learned": np.ones(2)}))
    assert stepped["fixed"] is params["fixed"]
    assert not any("fixed" in name for name in state)
    assert list(stepped) == list(params)


@pytest.mark.parametrize("change", [{"learning_rate": 0.2}, {"beta_1": 0.5}, {"beta_2": 0.5}, {"epsilon": 0.1}])
def test_every_setting_changes_the_result(change):
    def result(adam):
        return minimize(adam, {"x": np.array([3.0])}, lambda p: {"x": p["x"] ** 2}, 3)[0]["x"][0]

    assert abs(result(Adam(**{"learning_rate": 0.1, **change})) - result(Adam(0.1))) > 1e-3


def test_small_gradients_take_the_steps_that_epsilon_leaves_them():
    # √v = ε of functional Adam, and of the others in their first step.
    gradient = np.full(1, 1e-8 / np.sqrt(0.001))
    stepped, _ = minimize(Adam(0.1), {"x": np.zeros(1)}, lambda _: {"x": gradient}, 1)
    np.testing.assert_allclose(stepped["x"], [-0.1 / 2], rtol=1e-9)
    for kind, first, expected in ((AdamInPlace, 1e-5, 0.1 / 2), (RMSpropInPlace, 1e-4, 0.1 * 1e-4 / 2e-5)):
        params = np.zeros(1)
        optimizer = kind.of(kind.initial(params))
        optimizer.step(params, np.full(1, first), 0.1)
        np.testing.assert_allclose(params, [-expected], rtol=1e-9)


def positive_matrix(size, rng):
    root = rng.standard_normal((size, size))
    return root @ root.T + np.eye(size)


def solve(matrix, b, iterations=50, tolerance=1e-24):
    return conjugate_gradient(lambda v: matrix @ v, b, iterations=iterations, tolerance=tolerance)


def test_conjugate_gradient_solves_a_positive_system():
    rng = np.random.default_rng(0)
    matrix, b = positive_matrix(12, rng), rng.standard_normal(12)
    solution = solve(matrix, b)
    np.testing.assert_allclose(solution.x, np.linalg.solve(matrix, b), rtol=1e-8)
    assert solution.iterations < 50


def test_conjugate_gradient_tracks_its_residual():
    rng = np.random.default_rng(1)
    matrix, b = positive_matrix(12, rng), rng.standard_normal(12)
    solution = solve(matrix, b, iterations=4)
    assert solution.iterations == 4
    np.testing.assert_allclose(solution.residual, b - matrix @ solution.x, atol=1e-10)
    assert np.linalg.norm(solution.residual) > 1e-3


def test_conjugate_gradient_stops_at_its_tolerance():
    rng = np.random.default_rng(2)
    matrix, b = positive_matrix(12, rng), rng.standard_normal(12)
    loose, tight = (solve(matrix, b, tolerance=tolerance) for tolerance in (1e-2, 1e-12))
    assert loose.iterations < tight.iterations
    assert loose.residual @ loose.residual <= 1e-2


@pytest.mark.parametrize("bad", [-1.0, 0.0, np.nan])
def test_conjugate_gradient_stops_where_the_matrix_is_not_positive(bad):
    solution = solve(np.diag([1.0, 2.0, bad]), np.array([0.0, 0.0, 1.0]))
    assert (solution.iterations, solution.x.tolist()) == (1, [0, 0, 0])


def test_conjugate_gradient_keeps_what_it_found_before_negative_curvature():
    solution = solve(np.diag([4.0, 1.0, -0.5]), np.array([1.0, 1.0, 0.5]))
    assert 1 < solution.iterations < 50
    assert np.isfinite(solution.x).all()
    assert solution.x.any()


@pytest.mark.parametrize(("tolerance", "iterations"), [(2.0, 0), (1.999, 1)])
def test_conjugate_gradient_stops_where_its_residual_is_its_tolerance(tolerance, iterations):
    assert solve(np.eye(2), np.ones(2), tolerance=tolerance).iterations == iterations


def test_a_natural_step_has_the_divergence_of_its_bound():
    # With the Fisher matrix 3, x = g / 3 and xᵀ 3 x = g² / 3, to which 1e-8 is added: here, both are 1e-8.
    gradient = np.full(1, np.sqrt(3e-8))
    settings = NaturalSteps(max_kl=0.02, cg_damping=0, cg_tolerance=0)
    step, metrics = natural_step(lambda v: 3 * v, gradient, settings)
    np.testing.assert_allclose(step, -np.sqrt(2 * 0.02 / 2e-8) * gradient / 3, rtol=1e-6)
    assert metrics["cg_iterations"] == 1
    # Damped, the model has another direction, and another curvature.
    step, _ = natural_step(lambda v: 3 * v, np.ones(1), NaturalSteps(max_kl=0.02, cg_damping=1))
    np.testing.assert_allclose(step, [-np.sqrt(2 * 0.02 / (1 / 4)) / 4], rtol=1e-6)
    for nothing in (0.0, -1.0):
        step, _ = natural_step(lambda v, by=nothing: by * v, np.ones(1), NaturalSteps(cg_damping=0))
        assert step.tolist() == [0.0]


def test_the_solution_for_nothing_is_nothing():
    solution = solve(np.eye(3), np.zeros(3))
    assert (solution.iterations, solution.x.tolist()) == (0, [0, 0, 0])


def line_search(accept, **settings):
    """Search along a step of -1 from 1, and all that was tried on the way."""
    tried = []

    def evaluate(params):
        tried.append(1 - float(params["x"][0]))
        return tried[-1]

    found, metrics = search(
        {"x": np.ones(1)}, {"x": np.full(1, -1.0)}, evaluate, accept, NaturalSteps(backtrack_ratio=0.5, **settings)
    )
    return found, metrics, tried


def test_line_search_takes_the_first_fraction_that_is_accepted():
    found, metrics, tried = line_search(lambda x: x < 0.6, line_search_trials=9)
    assert tried == [1, 0.5]
    assert (found.params["x"].tolist(), found.value) == ([0.5], 0.5)
    assert metrics == {"line_search_trials": 2, "step_accepted": 1}


@pytest.mark.parametrize("max_trials", [1, 4])
def test_line_search_gives_up_after_its_trials(max_trials):
    found, metrics, tried = line_search(lambda x: False, line_search_trials=max_trials)
    assert (found, tried[-1]) == (None, 0.5 ** (max_trials - 1))
    assert metrics == {"line_search_trials": max_trials, "step_accepted": 0}
