"""The files of docs/lab parse, belong together, and say what the code says; tests/flows/test_slurm.py runs Slurm's."""

import configparser
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prefect_server import wait_for

LAB = Path(__file__).parents[2] / "docs" / "lab"
DEPLOYMENTS = yaml.safe_load((LAB.parents[1] / "prefect.yaml").read_text())["deployments"]
TLS = {
    f"DASK_DISTRIBUTED__COMM__TLS__{role}__{what}": f"/tls/{what.lower()}.pem"
    for role in ("SCHEDULER", "WORKER", "CLIENT")
    for what in ("CERT", "KEY")
} | {
    "DASK_DISTRIBUTED__COMM__TLS__CA_FILE": "/tls/cert.pem",
    "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "true",
    "DASK_DISTRIBUTED__SCHEDULER__HTTP__ROUTES": "[]",
    "DASK_DISTRIBUTED__WORKER__HTTP__ROUTES": "[]",
}


def manifests(kind):
    found = yaml.safe_load_all((LAB / "kubernetes.yaml").read_text())
    return {document["metadata"]["name"]: document for document in found if document["kind"] == kind}


@pytest.mark.parametrize("file", ["slurm.sh", "tls.sh"])
def test_scripts_are_ones_that_the_shell_takes(file):
    assert (LAB / file).stat().st_mode & 0o100
    subprocess.run(["bash", "-n", LAB / file], check=True)


COMMANDS = {
    "openssl": "exit 0",
    # Whatever follows --scheduler-file, in the script's job folder.
    "dask": """
[ "$1" = worker ] && { echo working; exec sleep 60; }
while [ "$1" != --scheduler-file ]; do shift; done
echo scheduling
echo '{"address": "tls://127.0.0.1:1"}' > "$2"
exec sleep 60""",
    "srun": 'shift 2; exec "$@"',
    "squeue": 'echo "$LEFT"',
    "scontrol": 'echo "$@" >> scontrol.txt; [ "$STAGE" = short ] || kill -KILL $(cat trainer.txt)',
}
# In Python, because a shell in the background cannot trap INT.
TRAINER = f"""#!{sys.executable}
import os, signal, sys, time
if sys.argv[1] == "show":
    sys.exit(1)
signal.signal(signal.SIGINT, signal.SIG_IGN if os.environ["STAGE"] == "long" else lambda *_: os._exit(130))
with open("metaloom.txt", "a") as file:
    print(*sys.argv[1:], file=file)
with open("trainer.txt", "w") as file:
    print(os.getpid(), file=file)
time.sleep(60)
"""


@pytest.mark.parametrize(("stage", "left"), [("short", "2-11:00:30"), ("long", "0:11")])
def test_a_job_of_an_array_trains_its_seed_is_queued_again_at_its_limit_and_keeps_its_logs(tmp_path, stage, left):
    scripts = {name: f"#!/bin/bash\n{script}\n" for name, script in COMMANDS.items()}
    for name, script in {**scripts, "metaloom": TRAINER}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_NTASKS": "2", "LEFT": left, "STAGE": stage}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    script = [LAB / "slurm.sh", "promp-ant-dir", "ant", "--set", "num_tasks=4"]
    with subprocess.Popen(script, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as job:
        wait_for(lambda: (tmp_path / "trainer.txt").exists(), "it trains", seconds=60)
        wait_for(lambda: "working" in (tmp_path / "metaloom-logs/7/workers.log").read_text(), "it works", seconds=60)
        job.send_signal(signal.SIGUSR1)
        said, _ = job.communicate(timeout=60)
    told = "train promp-ant-dir --run ant-seed-3 --set num_tasks=4 --set seed=3 --scheduler tls://127.0.0.1:1"
    assert (tmp_path / "metaloom.txt").read_text().split("\n") == [told, ""]
    assert (tmp_path / "scontrol.txt").read_text().split("\n") == ["requeue 7", ""]
    assert "queueing job 7 again, which resumes ant-seed-3" in said
    assert "scheduling" in (tmp_path / "metaloom-logs/7/scheduler.log").read_text()
    assert not [*tmp_path.glob(".metaloom-job-*")]


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_variants_for_other_pools_deploy_the_same_flows(kind):
    found = yaml.safe_load((LAB / f"prefect-{kind}.yaml").read_text())
    for name in ("name", "entrypoint", "tags"):
        assert [d[name] for d in found["deployments"]] == [d[name] for d in DEPLOYMENTS]
    queues = [d["work_pool"].get("work_queue_name") for d in found["deployments"]]
    assert queues == [d["work_pool"].get("work_queue_name") for d in DEPLOYMENTS]
    (step,) = found["pull"]
    assert [*step] == ["prefect.deployments.steps.set_working_directory"]


def test_every_part_of_the_composition_is_private_and_has_the_certificate():
    found = yaml.safe_load((LAB / "compose.yaml").read_text())
    services = found["services"]
    assert {port for service in services.values() for port in service.get("ports", [])} == {"127.0.0.1:4200:4200"}
    for name in ("serve", "scheduler", "worker"):
        assert services[name]["environment"].items() >= TLS.items()
        assert "./tls:/tls:ro" in services[name]["volumes"]
    named = {volume.split(":")[0] for service in services.values() for volume in service.get("volumes", [])}
    assert {volume for volume in named if not volume.startswith(".")} == {*found["volumes"]}


def test_whatever_a_manifest_names_is_there():
    pods = {
        name: document["spec"]["template"]["spec"]
        for kind in ("Deployment", "StatefulSet")
        for name, document in manifests(kind).items()
    }
    for name, pod in pods.items():
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["automountServiceAccountToken"] is False, name  # environments of users run there
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        claims = {volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values() if "secret" not in volume}
        assert claims <= {*manifests("PersistentVolumeClaim")}
        for container in pod["containers"]:
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= {*volumes, "data"}  # of the database's own claim
            maps = {source["configMapRef"]["name"] for source in container.get("envFrom", [])}
            assert maps <= {*manifests("ConfigMap")}
    assert manifests("ConfigMap")["metaloom-dask"]["data"] == TLS
    workloads = [*manifests("Deployment").values(), *manifests("StatefulSet").values()]
    labels = [document["spec"]["template"]["metadata"]["labels"] for document in workloads]
    for service in manifests("Service").values():
        assert service["spec"]["selector"] in labels
    # A run has one writer.
    assert manifests("Deployment")["serve"]["spec"]["replicas"] == 1
    assert manifests("Deployment")["serve"]["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize("file", ["lab/compose.yaml", "operations.md"])
def test_secrets_are_written_where_nobody_else_reads_them(file):
    text = (LAB.parent / file).read_text()
    assert 0 < text.index("umask 077") < text.index("> .env")


def test_manifests_are_ones_that_kubernetes_takes():
    validate = pytest.importorskip("kubernetes_validate", reason="`make setup` installs kubernetes-validate")
    for document in yaml.safe_load_all((LAB / "kubernetes.yaml").read_text()):
        validate.validate(document, validate.latest_version(), strict=True)


def test_the_unit_stops_so_that_flow_runs_go_on_at_the_next_start():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(LAB / "metaloom.service")
    assert dict(unit["Service"]).items() >= {"KillMode": "mixed", "KillSignal": "SIGTERM", "Restart": "always"}.items()


def test_the_image_is_pinned_and_does_not_run_as_root():
    lines = (LAB / "Dockerfile").read_text().splitlines()
    assert any(line.startswith("USER ") for line in lines)
    assert sum("--constraint requirements.lock" in line for line in lines) == 1
    ignored = (LAB / "Dockerfile.dockerignore").read_text().split()
    # Everything but what a wheel is made of.
    assert ignored[0] == "**"
    root = LAB.parents[1]
    assert [name for name in ignored if name.startswith("!") and not (root / name[1:]).exists()] == []
