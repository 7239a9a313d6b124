import re
import sys
from pathlib import Path

import numpy as np
import pytest
from env_names import ENV_NAMES
from gymnasium.spaces import Discrete
from gymnasium.utils.env_checker import check_env

from metaloom.pipeline.envs.config import EnvConfig
from metaloom.pipeline.envs.registry import make_env

DOCS = Path(__file__).parents[3] / "docs" / "environments"


@pytest.mark.parametrize("name", ENV_NAMES)
def test_every_environment_has_its_line_and_its_fields_on_the_page_it_names(name: str) -> None:
    line = re.search(rf"^\| `{name}` \|.*$", (DOCS / "README.md").read_text(), re.MULTILINE)
    assert line is not None
    env = make_env(EnvConfig(name=name))
    discrete = isinstance(env.action_space, Discrete)
    shapes = [space.shape or (0,) for space in (env.observation_space, env.action_space)]
    actions = f"{env.action_space.n} discrete" if discrete else shapes[1][0]
    assert f"| {shapes[0][0]}, {actions} |" in line.group()
    page = re.search(r"\((\w+\.md)\)", line.group())
    assert page is not None
    text = (DOCS / page.group(1)).read_text()
    env.reset(seed=0)
    terms = env.step(0 if discrete else np.zeros(shapes[1]))[4]["reward_terms"]
    for word in [name, *(field.name for field in env.task_fields), *terms]:
        assert f"`{word}`" in text, word


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_the_example_of_an_env_of_ones_own_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "README.md").read_text()
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
