import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from env_names import ENV_NAMES
from gymnasium.spaces import Discrete
from gymnasium.utils.env_checker import check_env

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.registry import find_env, make_env

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    """The sections of the reference of environments, which the documentation's site makes from the classes."""
    page = (DOCS / "environments" / "reference.md").read_text(encoding="utf-8")
    filled = runpy.run_path(str(DOCS / "site_hooks.py"))["on_page_markdown"](page)
    return {title: text for title, _, text in (part.partition("\n") for part in filled.split("\n## "))}


@pytest.mark.parametrize("name", ENV_NAMES)
def test_every_environment_has_its_fields_and_terms_in_the_reference(reference: dict[str, str], name: str) -> None:
    env = make_env(EnvConfig(name=name))
    titles = {name, *(base.__name__ for base in find_env(name).__mro__)}
    text = "\n".join(about for title, about in reference.items() if title in titles)
    all_text = "\n".join(reference.values())
    env.reset(seed=0)
    action = 0 if isinstance(env.action_space, Discrete) else np.zeros(env.action_space.shape or ())
    for word in [*(field.name for field in env.task_fields), *env.step(action)[4]["reward_terms"]]:
        # Multipliers of a body are named by its parts and quantities, numbered fields by the first.
        body = re.fullmatch(r"(\w+?)_(mass|inertia|friction|damping)(_\w+)?", word)
        for part in filter(None, body.groups()) if body else [word]:
            assert re.search(re.sub(r"\d+$", r"\\d", part) + r"\b", all_text if body else text), word


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_the_example_of_an_env_of_ones_own_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "environments/README.md").read_text()
    (code,) = re.findall(r"<!-- save as: my_envs.py -->\n```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_envs.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    env = make_env(EnvConfig(name="my_envs:Thermostat"))
    check_env(env, skip_render_check=True)
    env.set_task(np.array([20.0]))
    env.reset(seed=0)
    _, reward, _, _, info = env.step(np.zeros(1))
    assert reward == sum(info["reward_terms"].values())
    monkeypatch.delitem(sys.modules, "my_envs")
