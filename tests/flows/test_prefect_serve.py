"""Refusals of `make serve` before it starts anything; all it starts is in test_prefect_server.py."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).parents[2]


def serve(folder: Path, port: int) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "metaloom.flows.prefect_app.serve", "--port", str(port)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.fixture
def project(tmp_path):
    (tmp_path / "prefect.yaml").symlink_to(PROJECT / "prefect.yaml")
    return tmp_path


def test_a_port_in_use_is_refused_with_the_way_to_another(project):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = serve(project, port)
    assert refused.returncode == 1
    assert f"port {port}" in refused.stdout
    assert "--port" in refused.stdout
    assert not (project / ".prefect").exists()


def test_another_folder_is_refused(tmp_path):
    refused = serve(tmp_path, 4200)
    assert refused.returncode == 1
    assert "prefect.yaml" in refused.stdout


def test_every_deployment_is_named_like_its_flow():
    from metaloom.flows.prefect_app import deployments as meta_train

    flows = {"meta_train": meta_train.meta_train, "replay": meta_train.replay, "evaluate": meta_train.evaluate}
    deployments = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    names = {d["entrypoint"].removeprefix("metaloom.flows.prefect_app.deployments."): d["name"] for d in deployments}
    assert names == {function: flow.name for function, flow in flows.items()}
