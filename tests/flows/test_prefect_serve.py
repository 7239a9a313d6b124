"""Refusals of `metaloom serve` before it starts anything; all it starts is in test_prefect_server.py."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from metaloom.flows.prefect_app.serve import HERE, _folder_settings, _prepare, _ready


def serve(folder: Path, port: int) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "metaloom.flows.cli", "serve", "--port", str(port)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_a_port_in_use_is_refused_with_the_way_to_another(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = serve(tmp_path, port)
    assert refused.returncode == 1
    assert f"port {port}" in refused.stderr
    assert "--port" in refused.stderr
    assert not any(tmp_path.iterdir())


def test_a_folder_with_broken_settings_of_prefect_is_refused(tmp_path):
    (tmp_path / "prefect.toml").write_text("[api")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    refused = serve(tmp_path, port)
    assert refused.returncode == 1
    assert str(tmp_path) in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("prefect.toml", ""),
        ("prefect.toml", "[worker]\nquery_seconds = 2"),
        ("pyproject.toml", "[tool.prefect]\nhome = 'x'"),
    ],
)
def test_settings_of_the_folder_s_own_are_left_alone_and_told_what_they_lack(tmp_path, file, text):
    (tmp_path / file).write_text(text)
    _prepare(tmp_path, 4201)
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == {file: text}
    told = _ready(4201, _folder_settings(tmp_path))
    assert "run meta-train/meta-train" in told
    assert "first, in that shell: export PREFECT_API_URL=http://127.0.0.1:4201/api" in told


def test_a_folder_without_settings_gets_those_by_which_the_bare_name_is_enough(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'mine'")
    _prepare(tmp_path, 4201)
    told = _ready(4201, _folder_settings(tmp_path))
    assert "run meta-train -p" in told
    assert "first, in that shell" not in told


def test_every_deployment_is_named_like_its_flow():
    from metaloom.flows.prefect_app import deployments as meta_train

    flows = {"meta_train": meta_train.meta_train, "replay": meta_train.replay, "evaluate": meta_train.evaluate}
    deployments = yaml.safe_load((HERE / "prefect.yaml").read_text())["deployments"]
    names = {d["entrypoint"].removeprefix("metaloom.flows.prefect_app.deployments."): d["name"] for d in deployments}
    assert names == {function: flow.name for function, flow in flows.items()}
