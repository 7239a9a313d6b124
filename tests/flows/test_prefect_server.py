"""What one installs, in an empty folder: `metaloom serve` from the wheel, driven by the real `prefect` command.

So all of these tests also try what the wheel lacks or would find only among the sources.
"""

import html
import http.client
import json
import re
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from browsing import NEEDS_BROWSER, OTHER_HOST, look
from prefect import get_client
from prefect.flows import load_flow_from_entrypoint
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect_server import Served, iterations_of, part_of, serving, typed, wait_for

from metaloom import storage
from metaloom.flows import cli
from metaloom.flows.commands.train import train
from metaloom.flows.prefect_app import deployments
from metaloom.flows.prefect_app.deploy import deploy
from metaloom.flows.prefect_app.flow_process import MODULE
from metaloom.flows.rollouts.workers import Backend
from metaloom.pipeline.config.run import RunConfig

pytestmark = [pytest.mark.prefect, pytest.mark.slow]
SMALL = ("num_tasks=12", "episodes_per_task=2", "max_episode_steps=5")
"""Settings of a run with few steps and a task in every corner."""


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory) -> Path:
    """The programs of a fresh environment with the wheel in it, which finds its requirements among the present ones."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder)
    names = {"base": str(folder), "platbase": str(folder)}
    bin, packages = (Path(sysconfig.get_path(what, vars=names)) for what in ("scripts", "purelib"))
    options = ["--no-deps", "--no-index", "--disable-pip-version-check", "--quiet"]
    install = [sys.executable, "-m", "pip", "--python", bin / "python", "install", *options, wheel]
    subprocess.run(install, check=True, capture_output=True, text=True)
    # Files of .pth that lie there are not read, so the sources that the present environment points to stay unknown.
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    prefect = bin / "prefect"
    prefect.write_text(f"#!{bin / 'python'}\nimport sys\n\nfrom prefect.cli import app\n\nsys.exit(app())\n")
    prefect.chmod(0o755)
    return bin


@pytest.fixture(scope="module")
def served(programs, tmp_path_factory) -> Iterator[Served]:
    with serving(programs, tmp_path_factory.mktemp("empty"), tmp_path_factory.mktemp("log") / "serve.log") as served:
        yield served


@pytest.fixture(scope="module")
def yearly(served) -> str:
    """A deployment with a schedule, at which the server looks once a minute."""
    (deployment,) = served.ask("deployments/filter", deployments={"name": {"any_": ["evaluate"]}})
    served.tell(f"deployments/{deployment['id']}/schedules", [{"schedule": {"cron": "0 0 1 1 *"}, "active": True}])
    return deployment["id"]


@pytest.fixture(scope="module")
def first(served, yearly) -> dict[str, Any]:
    """The flow run that trained the run "first", started by the bare name."""
    done = served.prefect(
        *("deployment", "run", "meta-train", "--watch"),
        *("-p", "recipe=promp-point-corner", "-p", "iterations=2", "-p", "run=first", "-p", "seed=5"),
        *("-p", f"overrides={json.dumps([*SMALL])}"),
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{served.flow_run('first')['state']['message']}"
    return served.flow_run("first")


def test_the_wheel_trains_and_reports_in_an_empty_folder(programs, tmp_path):
    settings = ("iterations=1", "num_tasks=2", *SMALL[1:])
    changes = [part for setting in settings for part in ("--set", setting)]
    train = ["train", "promp-point-corner", "--run", "mine", *changes, "--workers", "0"]
    # As `metaloom` does, in one process, which has imported everything after the first command.
    code = (
        "from metaloom.flows import cli; "
        f"assert cli.run({train}) == cli.run(['report', 'mine', '--out', 'pages']) == 0; print(cli.__file__)"
    )
    done = typed(programs / "python", "-c", code, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "pages"}
    assert {path.suffix for path in (tmp_path / "pages").iterdir()} == {".png", ".html"}
    assert Path(done.stdout.splitlines()[-1]).is_relative_to(programs.parent)


def test_the_bare_name_runs_the_flow_to_completion(served, first):
    assert first["state"]["type"] == "COMPLETED"
    assert "2 iterations" in first["state"]["message"]
    run = storage.open_run(served.folder / "runs" / "first")
    assert list(run.iterations) == [0, 1]
    assert run.config["seed"] == 5


def test_the_flow_run_is_tagged_with_environment_and_algorithm(first):
    assert set(first["tags"]) == {"metaloom", "point-corner", "promp"}


def test_every_stage_is_one_completed_task_run_named_after_it(served, first):
    steps = ["sample_tasks i={i} k=0", "collect_rollouts i={i} k=0", "process_samples i={i} k=0", "adapt i={i} k=0"]
    steps += ["collect_rollouts i={i} k=1", "process_samples i={i} k=1", "meta_optimize i={i} k=0"]
    expected = ["initialize i=0 k=0", *(step.format(i=i) for i in range(2) for step in steps)]

    def completed() -> list[str]:
        tasks = served.of_flow_run("task_runs", first["id"])
        return sorted(task["name"] for task in tasks if task["state_type"] == "COMPLETED")

    # The server records task runs from a stream of events, a moment after the flow has ended.
    wait_for(lambda: len(completed()) >= len(expected), "task runs are recorded")
    assert completed() == sorted(expected)


def test_a_task_run_is_linked_to_those_whose_outputs_it_reads(served, first):
    tasks = served.of_flow_run("task_runs", first["id"])
    names = {task["id"]: task["name"] for task in tasks}
    links = {task["name"]: {names[link["id"]] for link in task["task_inputs"]["inputs"]} for task in tasks}
    assert links["sample_tasks i=1 k=0"] == set()
    assert links["collect_rollouts i=1 k=0"] == {"sample_tasks i=1 k=0", "meta_optimize i=0 k=0"}
    assert links["adapt i=0 k=0"] == {"initialize i=0 k=0", "collect_rollouts i=0 k=0", "process_samples i=0 k=0"}


def test_the_page_shows_progress_metrics_and_where_the_run_lies(served, first):
    artifacts = {artifact["key"]: artifact for artifact in served.of_flow_run("artifacts", first["id"])}
    kinds = {key: artifact["type"] for key, artifact in artifacts.items()}
    assert kinds == {
        "progress-first": "progress",
        "metrics-first": "table",
        "summary-first": "markdown",
        "report-first": "markdown",
        "curve-first": "image",
    }
    assert artifacts["progress-first"]["data"] == 100.0
    metrics = {row["metric"] for row in json.loads(artifacts["metrics-first"]["data"])}
    run = storage.open_run(served.folder / "runs" / "first")
    by_class = {name for name in metrics if ", class " in name}
    assert metrics - by_class == set(run[1].metrics())
    assert len(by_class) == 2 * (4 + 1)  # before and after adaptation, by corner and with all corners counted alike
    with urllib.request.urlopen(artifacts["curve-first"]["data"], timeout=120) as image:
        assert image.headers["Content-Type"] == "image/png"
    (address,) = re.findall(r"\((http://[^)]*)\)", artifacts["report-first"]["data"])
    with urllib.request.urlopen(address, timeout=120) as page:
        assert b"Learning curve" in page.read()


def test_every_iteration_is_an_event_of_its_flow_run(served, first):
    def events() -> list[dict[str, Any]]:
        found = served.ask("events/filter", filter={"event": {"name": ["metaloom.iteration.done"]}})["events"]
        return sorted(
            (e for e in found if e["resource"]["prefect.resource.name"] == "first"), key=lambda e: e["occurred"]
        )

    wait_for(lambda: len(events()) >= 2, "events are recorded")
    run = storage.open_run(served.folder / "runs" / "first")
    for i, event in enumerate(events()[:2]):
        assert event["payload"]["iteration"] == i
        told = event["payload"]["metrics"]
        assert told == {name: value for name, value in run[i].metrics().items() if name in told}
        assert f"prefect.flow-run.{first['id']}" in {r["prefect.resource.id"] for r in event["related"]}


def test_one_training_at_a_time(served):
    (queue,) = served.ask("work_queues/filter", work_queues={"name": {"any_": ["training"]}})
    assert queue["concurrency_limit"] == 1
    for name in ("meta-train", "meta-train-custom"):
        (deployment,) = served.ask("deployments/filter", deployments={"name": {"any_": [name]}})
        assert deployment["work_queue_id"] == queue["id"]
        # A lease of a flow that must be renewed, which ends a training that cannot reach the server.
        assert deployment["global_concurrency_limit"] is None


def test_what_people_set_stays_when_the_flows_are_deployed_again(served, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(served.programs / "python"))

    def deployed_again() -> list[str]:
        with here(served), get_client(sync_client=True) as client:
            return [*deploy(client)]

    def of_people() -> dict[str, Any]:
        (deployment,) = served.ask("deployments/filter", deployments={"name": {"any_": ["replay"]}})
        (queue,) = served.ask("work_queues/filter", work_queues={"name": {"any_": ["training"]}})
        pool = served.tell("work_pools/local", method="GET")
        found = {name: deployment[name] for name in (*set_by_people, "schedules", "pull_steps", "entrypoint")}
        limits = {"limit": queue["concurrency_limit"], "pool": (pool["concurrency_limit"], pool["description"])}
        return found | limits | {"paused queue": queue["is_paused"]}

    (deployment,) = served.ask("deployments/filter", deployments={"name": {"any_": ["replay"]}})
    (queue,) = served.ask("work_queues/filter", work_queues={"name": {"any_": ["training"]}})
    set_by_people = {
        "description": "Ask Anna first.",
        "tags": ["metaloom", "anna"],
        "parameters": {"workers": 3},
        "job_variables": {**deployment["job_variables"], "env": {"OMP_NUM_THREADS": "1"}},
        "paused": True,
        "enforce_parameter_schema": False,
    }
    path = f"deployments/{deployment['id']}"
    served.tell(f"{path}/schedules", [{"schedule": {"cron": "0 0 1 1 *"}, "active": False, "slug": "yearly"}])
    served.tell(path, set_by_people, method="PATCH")
    served.tell(f"work_queues/{queue['id']}", {"concurrency_limit": None, "is_paused": True}, method="PATCH")
    served.tell("work_pools/local", {"concurrency_limit": 7, "description": "Anna's"}, method="PATCH")
    before = of_people()
    assert {name: before[name] for name in set_by_people} == set_by_people
    waiting = "the work queue training is paused: nothing trains until `prefect work-queue resume training -p local`"
    paused = "deployment replay/replay is paused: its schedules start nothing until it is resumed on Prefect's page"
    try:
        assert deployed_again() == [waiting, paused]
        assert of_people() == before
        # As an earlier version, another interpreter and a flow with other parameters have left it.
        step = {"prefect.deployments.steps.set_working_directory": {"directory": "/tmp"}}
        job = {**set_by_people["job_variables"], "command": f"/old/python -P -m {MODULE}"}
        served.tell(path, {"pull_steps": [step], "entrypoint": "old.module", "job_variables": job}, method="PATCH")
        changed = "deployment replay/replay: updated entrypoint, job_variables, pull_steps"
        assert deployed_again() == [waiting, changed, paused]
        assert of_people() == before | {"pull_steps": before["pull_steps"] or []}
        # A command of their own, whose quotation has no end.
        served.tell(path, {"job_variables": {"command": "sh -c 'x"}}, method="PATCH")
        assert deployed_again() == [waiting, paused]
    finally:
        served.tell(path, {"paused": False, "parameters": {}}, method="PATCH")
        served.tell(f"work_queues/{queue['id']}", {"concurrency_limit": 1, "is_paused": False}, method="PATCH")
        served.tell(path, {"job_variables": deployment["job_variables"]}, method="PATCH")


def test_a_wrong_parameter_is_refused_before_a_flow_run_exists(served, first, tmp_path):
    """By the schema, of which test_prefect_flow.py has what else it refuses; from any folder, by the full name."""
    # The server may schedule the next run of `yearly` at any moment.
    of_meta_train = {"deployments": {"name": {"any_": ["meta-train"]}}}
    before = served.ask("flow_runs/count", **of_meta_train)
    assert before == 1
    refused = typed(
        served.programs / "prefect",
        *("deployment", "run", "meta-train/meta-train", "-p", "learning_rate=0.1"),
        folder=tmp_path,
        PREFECT_API_URL=f"http://127.0.0.1:{served.port}/api",
        PREFECT_API_AUTH_STRING=served.password,
    )
    assert refused.returncode == 1
    assert "learning_rate" in refused.stdout + refused.stderr
    with pytest.raises(urllib.error.HTTPError) as page:
        served.start("meta-train", iterations=-1)
    assert (page.value.code, "minimum" in page.value.read().decode()) == (409, True)
    assert served.ask("flow_runs/count", **of_meta_train) == before


def test_a_run_is_replayed_by_its_path_and_found_identical(served, first):
    run = path_of(served, "first")
    (deployment,) = served.ask("deployments/filter", deployments={"name": {"any_": ["replay"]}})
    flow: Any = load_flow_from_entrypoint(deployment["entrypoint"])  # as the process of a flow run does
    with here(served):
        assert flow(run=run, iteration=1, return_state=True).is_completed()
    assert served.flow_run(f"replay {run}")["state"]["message"] == "7 stages replayed: all identical"


def test_a_run_is_extended_by_the_flow_that_trained_it(served, first):
    with here(served):
        state = deployments.meta_train(run=path_of(served, "first"), iterations=3, workers=0, return_state=True)
    assert state.is_completed()
    assert list(storage.open_run(served.folder / "runs" / "first").iterations) == [0, 1, 2]


def test_a_run_is_not_continued_with_other_settings(served, first):
    with here(served):
        state = deployments.meta_train(run=path_of(served, "first"), seed=6, workers=0, return_state=True)
    assert state.is_failed()
    assert "seed is 5 in the stored run, but 6 was requested" in state.message


SPAWN = {"name": "x", "pull_steps": [{"prefect.deployments.steps.run_shell_script": {"script": "id"}}]}
TYPED, FORM, TEXT = "application/json", "application/x-www-form-urlencoded", "text/plain"
EVIL = f"http://{OTHER_HOST}"
WEBSOCKET = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "x" * 22 + "==",
    "Sec-WebSocket-Protocol": "prefect",
}
# What a page of another origin can have a browser send: method, path, headers, body.
FOREIGN: list[tuple[str, str, dict[str, str], str]] = [
    ("GET", "/api/deployments/name/meta-train/meta-train", {"Origin": EVIL}, ""),
    ("GET", "/api/admin/version", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, ""),
    ("GET", "/api/flows/name/meta-train", {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"}, ""),
    ("HEAD", "/api/deployments/name/meta-train/meta-train", {"Origin": EVIL}, ""),
    ("OPTIONS", "/api/deployments/", {"Origin": EVIL, "Access-Control-Request-Method": "POST"}, ""),
    ("OPTIONS", "/api/deployments/", {"Origin": "null", "Access-Control-Request-Headers": "authorization"}, ""),
    ("POST", "/api/deployments/", {"Origin": EVIL, "Content-Type": TYPED}, json.dumps(SPAWN)),
    ("POST", "/api/deployments/", {"Origin": EVIL, "Content-Type": TEXT}, json.dumps(SPAWN)),
    ("POST", "/api/deployments/", {"Origin": "null", "Content-Type": TEXT}, json.dumps(SPAWN)),
    ("POST", "/api/flow_runs/", {"Origin": EVIL, "Content-Type": FORM}, "name=x"),
    ("POST", "/api/flow_runs/", {"Origin": EVIL, "Content-Type": "multipart/form-data; boundary=x"}, "--x--"),
    ("POST", "/api/flow_runs/", {"Origin": "http://127.0.0.1:1", "Content-Type": TEXT}, "{}"),
    ("POST", "/api/variables/", {"Host": OTHER_HOST, "Origin": EVIL}, '{"name": "x", "value": 1}'),
    ("POST", "/api/variables/", {"Host": "127.0.0.1.evil.example"}, '{"name": "x", "value": 1}'),
    ("POST", "/api/variables/", {"Content-Type": TEXT}, '{"name": "x", "value": 1}'),
    ("PUT", "/api/automations/", {"Origin": EVIL, "Authorization": "Basic bWV0YWxvb206"}, "{}"),
    ("PATCH", "/api/work_pools/local", {"Origin": EVIL, "Content-Type": TYPED}, '{"is_paused": true}'),
    ("DELETE", "/api/work_pools/local", {"Origin": EVIL}, ""),
    ("GET", "/", {"Host": OTHER_HOST}, ""),
    ("GET", "/open", {"Host": OTHER_HOST}, ""),
    ("GET", "/open", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, ""),
    ("GET", "/api/events/in", {"Origin": EVIL, **WEBSOCKET}, ""),
    ("GET", "/api/events/out", {"Host": OTHER_HOST, **WEBSOCKET}, ""),
    ("GET", "/api/logs/out", {"Origin": "null", **WEBSOCKET}, ""),
]


def counts(served: Served) -> dict[str, object]:
    """How much of every kind there is in the server, and whether its pool is paused."""
    kinds = ("deployments", "flow_runs", "flows", "automations", "variables", "block_documents", "work_queues")
    asked = {kind: served.ask(f"{kind}/filter") for kind in kinds}
    # The server may plan the runs of a schedule at any moment.
    found: dict[str, object] = {
        kind: sum(not one.get("auto_scheduled") for one in of_kind) for kind, of_kind in asked.items()
    }
    return found | {"pool": served.tell("work_pools/local", method="GET")["is_paused"]}


def test_nothing_that_another_page_can_send_is_answered_or_changes_anything(served):
    before = counts(served)
    for method, path, headers, body in FOREIGN:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        told = answer.read().decode()
        # A request without any word of where it comes from may be a program's, which says the password.
        expected = (403, 421) if {"Origin", "Host", "Sec-Fetch-Site"} & {*headers} else (401,)
        assert answer.status in expected, (method, path, headers, told)
        assert not any(name.lower().startswith("access-control") for name in answer.headers)
        connection.close()
    assert counts(served) == before


ATTACK = r"""<!doctype html><form method=post target=frame enctype=text/plain><input name=a></form>
<iframe name=frame></iframe><pre></pre><script>
const body = JSON.stringify(SPAWN), told = [];
const json = { "Content-Type": "application/json" };
async function attack(server) {
  const api = `${server}/api`;
  const attempt = (what, path, options) => fetch(api + path, { method: "POST", body, ...options }).then(
    (answer) => told.push(`${what} ${server}: got ${answer.status}`), () => told.push(`${what} ${server}: refused`));
  await attempt("read", "/admin/version", { method: "GET", body: null });
  await attempt("health", "/health", { method: "GET", body: null });
  await attempt("write", "/deployments/", { headers: json });
  await attempt("guess", "/deployments/", { headers: { ...json, Authorization: "Basic bWV0YWxvb206" } });
  await attempt("credentials", "/deployments/", { credentials: "include" });
  await attempt("erase", "/work_pools/local", { method: "DELETE", body: null });
  await fetch(`${api}/deployments/`, { method: "POST", body, mode: "no-cors" }).catch(() => 0);
  navigator.sendBeacon(`${api}/deployments/`, body);
  const form = document.forms[0], frame = document.querySelector("iframe");
  form.action = `${api}/deployments/`;
  form.submit();
  await new Promise((done) => setTimeout(done, 200));
  frame.src = `${server}/open`;
  await new Promise((done) => setTimeout(done, 200));
  const socket = new WebSocket(`${api.replace("http", "ws")}/events/in`, "prefect");
  let heard = "";
  socket.onopen = () => { heard = "got in"; };
  socket.onerror = () => { heard = "refused"; };
  while (!heard) await fetch("/");  // the browser's clock waits for this, but not for sockets
  told.push(`socket ${server}: ${heard}`);
}
(async () => {
  for (const server of SERVERS) await attack(server);
  document.querySelector("pre").textContent = [...told, "all tried"].join("\n");
})();
</script>"""


@NEEDS_BROWSER
def test_a_page_of_another_origin_gets_nowhere_in_the_browser_that_is_logged_in(served, tmp_path):
    (address,) = re.findall(r"http://\S+/open#\S+", served.log.read_text())
    hosts = ("127.0.0.1", "localhost", OTHER_HOST)
    servers = [f"http://{host}:{served.port}" for host in hosts]
    (tmp_path / "page").mkdir()
    page = ATTACK.replace("SPAWN", json.dumps(SPAWN)).replace("SERVERS", json.dumps(servers))
    (tmp_path / "page" / "index.html").write_text(page)
    before = counts(served)
    for host in ("127.0.0.1", "localhost"):
        markup, _ = look(address.replace("127.0.0.1", host), tmp_path / "profile")
        assert "Active Work Pools" in markup, "it is logged in"
    for where in hosts:
        with serving_files(tmp_path / "page") as port:
            markup, _ = look(f"http://{where}:{port}/", tmp_path / "profile")
        told = html.unescape(markup.partition("<pre>")[2].partition("</pre>")[0]).splitlines()
        assert told[-1:] == ["all tried"], markup
        assert [line for line in told[:-1] if not line.endswith("refused")] == [], where
        assert len(told) == 3 * 7 + 1
        assert counts(served) == before, where
    markup, _ = look(address, tmp_path / "profile")
    assert "Active Work Pools" in markup, "no attack has logged it out"


@NEEDS_BROWSER
@pytest.mark.parametrize(("end", "words"), [("/", "Login"), ("/open#bWV0YWxvb206", "This is not the address")])
def test_the_page_is_opened_logged_in_by_the_address_that_was_printed_alone(served, end, words, tmp_path):
    markup, _ = look(f"http://127.0.0.1:{served.port}{end}", tmp_path)
    assert words in markup
    assert "Active Work Pools" not in markup


def test_evaluate_reports_the_return_after_every_adaptation_step(served, first):
    run = path_of(served, "first")
    with here(served):
        done = deployments.evaluate(run, num_tasks=2, adaptation_steps=2, workers=0, return_state=True)
    assert done.is_completed()
    evaluated = served.flow_run(f"evaluate {run}")
    (table,) = served.of_flow_run("artifacts", evaluated["id"])
    assert [row["adaptation_steps"] for row in json.loads(table["data"])] == [0, 1, 2]


SLOW = """
import time

from metaloom.pipeline.envs.point_corner import PointCorner


class Slow(PointCorner):
    def start(self, rng):
        time.sleep(0.01)
        return super().start(rng)
"""
"""Leaves the processor to the process that starts."""


def test_a_training_outlives_its_own_process(served, tiny_config: Callable[..., RunConfig], digests, monkeypatch):
    """It is killed, and nobody does anything about it; then it is cancelled in the page."""
    (served.folder / "slow_corner.py").write_text(SLOW)
    slow = {"name": "slow_corner:Slow", "options": {"reward": "dense"}, "copies": "kept", "action_scale": None}
    config = tiny_config(env=slow, iterations=100_000).model_dump(mode="json")
    id = served.start("meta-train-custom", run="killed", workers=0, config=config)
    folder = served.folder / "runs" / "killed"
    wait_for(lambda: iterations_of(folder) > 2, "it trains")
    part_of(served, MODULE).kill()
    killed = iterations_of(folder)

    def run() -> dict[str, Any]:
        (found,) = served.ask("flow_runs/filter", flow_runs={"id": {"any_": [id]}})
        return found

    wait_for(lambda: iterations_of(folder) > killed + 2, "it trains in another process")
    assert (run()["state"]["type"], run()["run_count"]) == ("RUNNING", 2)
    require_cancelled_in_time(served, "killed")
    monkeypatch.syspath_prepend(served.folder)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    alone = tiny_config(env=slow, iterations=iterations_of(folder))
    expected = digests(train(alone, served.folder / "alone", backend=Backend(workers=0)).path)
    found = digests(folder)
    assert {key: found[key] for key in expected} == expected
    assert "Traceback" not in (served.folder / ".prefect" / "server.log").read_text()


@pytest.mark.sweep
def test_a_cancelled_flow_run_ends_behind_a_stage_within_fifteen_seconds(served, tiny_config: Callable[..., RunConfig]):
    config = tiny_config(iterations=100_000).model_dump(mode="json")
    served.start("meta-train-custom", run="cancelled", workers=0, config=config)
    wait_for(lambda: iterations_of(served.folder / "runs" / "cancelled") > 1, "it trains")
    require_cancelled_in_time(served, "cancelled")


def test_a_flow_run_that_is_cancelled_before_its_process_begins_trains_nothing(
    served, tiny_config: Callable[..., RunConfig]
):
    config = tiny_config(iterations=100_000).model_dump(mode="json")
    id = served.start("meta-train-custom", run="pending", workers=0, config=config)

    def state() -> str:
        (found,) = served.ask("flow_runs/filter", flow_runs={"id": {"any_": [id]}})
        return found["state"]["type"]

    wait_for(lambda: state() == "PENDING", "its process is being started")
    served.ask(f"flow_runs/{id}/set_state", state={"type": "CANCELLING", "name": "Cancelling"})
    wait_for(lambda: state() == "CANCELLED", "it is cancelled")
    assert not (served.folder / "runs" / "pending").exists()


def test_a_flow_that_is_asked_to_stop_is_cancelled_behind_a_stage(served, tiny_config: Callable[..., RunConfig]):
    folder, asked = served.folder / "runs" / "asked", []

    def ask() -> None:
        wait_for(lambda: iterations_of(folder) > 1, "it trains")
        asked.append(cli.run(["cancel", str(folder)]))

    with here(served), ThreadPoolExecutor(1) as other:
        done = other.submit(ask)
        config = tiny_config(iterations=100_000)
        state = deployments.meta_train_custom(config, str(folder), workers=0, return_state=True)
        done.result()
    assert (asked, state.type.value) == ([0], "CANCELLED")
    assert f"after {len(storage.open_run(folder).iterations)} iterations" in state.message
    assert storage.verify_run(folder) == []


def test_a_schedule_has_its_flow_runs_planned(served, yearly):
    """Which fails inside the server, and is told in its log alone, where it has an SQLAlchemy that it cannot use.

    The server looks once a minute, so the tests before this one take the time until it has.
    """
    of_it = {"deployment_id": {"any_": [yearly]}, "state": {"type": {"any_": ["SCHEDULED"]}}}
    wait_for(lambda: served.ask("flow_runs/count", flow_runs=of_it) > 0, "its next flow runs are planned")


def require_cancelled_in_time(served: Served, name: str) -> None:
    """Cancel a flow run as the page does."""
    folder, run = served.folder / "runs" / name, served.flow_run(name)
    served.ask(f"flow_runs/{run['id']}/set_state", state={"type": "CANCELLING", "name": "Cancelling"})
    wait_for(lambda: served.flow_run(name)["state"]["type"] == "CANCELLED", "it is cancelled", seconds=15)
    # Its own word, which it would not have had if the stage had been broken off.
    done = f"cancelled after {len(storage.open_run(folder).iterations)} iterations"
    assert served.flow_run(name)["state"]["message"] == done
    assert storage.verify_run(folder) == []


def path_of(served: Served, name: str) -> str:
    return str(served.folder / "runs" / name)


@contextmanager
def here(served: Served) -> Iterator[None]:
    """Flows that are called in this process tell the server, without a process of their own that imports all."""
    server = {PREFECT_API_URL: f"http://127.0.0.1:{served.port}/api", PREFECT_API_AUTH_STRING: served.password}
    with temporary_settings(server):
        yield


@contextmanager
def serving_files(folder: Path) -> Iterator[int]:
    """Yield the port at which a folder is served."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()
