"""The scaler between a coordinator and Kubernetes: a real stream, and an HTTP server that answers as the API does."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from headrace.coordinator.v1 import fleet_pb2
from headrace_servicekit.process.supervisor_link import SupervisorLink
from headrace_servicekit.scaling.__main__ import Scaler, main, numbers_of
from headrace_servicekit.scaling.orchestrators import Kubernetes

PATH = "/apis/apps/v1/namespaces/training/{}/scale"
TARGETS = {"rollout": "deployments/post-rollout", "trainer": "statefulsets/post-trainer"}


@pytest.fixture
def api():
    """An API server with two objects; `refuse` (a status and its message) has it say no."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if server.refuse:
                self.answer(server.refuse[0], {"kind": "Status", "message": server.refuse[1]})
            elif self.path != "/api/v1/namespaces/training/pods?labelSelector=fleet%3Da":
                self.answer(404, {"kind": "Status", "message": f"{self.path} not found"})
            else:
                pods = [
                    {"metadata": {"name": name}, "status": {"phase": phase}}
                    for name, phase in server.pods.items()
                ]
                self.answer(200, {"kind": "PodList", "items": pods})

        def do_PATCH(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.headers["Authorization"] != "Bearer secret":
                self.answer(401, {"message": "Unauthorized"})
            elif server.refuse:
                self.answer(server.refuse[0], {"kind": "Status", "message": server.refuse[1]})
            elif (
                self.path not in server.replicas
                or self.headers["Content-Type"] != "application/merge-patch+json"
            ):
                self.answer(404, {"kind": "Status", "message": f"{self.path} not found"})
            else:
                server.replicas[self.path] = body["spec"]["replicas"]
                self.answer(200, {"kind": "Scale", "spec": body["spec"]})

        def answer(self, status, body):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.replicas = {PATH.format(target): 1 for target in TARGETS.values()}
    server.refuse = None
    server.pods = {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def kubernetes(api, tmp_path):
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "namespace").write_text("training")
    return Kubernetes(f"http://127.0.0.1:{api.server_port}", TARGETS, tmp_path, "fleet=a")


async def test_pods_that_were_seen_and_are_gone_are_told_until_they_are_back(
    api, kubernetes, servers, new_fleet, until
):
    scaler = Scaler(kubernetes, {})
    api.pods = {"post-rollout-a": "Running", "post-rollout-b": "Pending"}
    assert await scaler.look() == []
    api.pods = {"post-rollout-a": "Failed", "post-rollout-c": "Running"}
    assert await scaler.look() == ["post-rollout-a", "post-rollout-b"]
    api.refuse = 403, "pods is forbidden"
    assert await scaler.look() == [], "who cannot see says nothing"
    api.refuse, api.pods = None, {"post-rollout-a": "Running"}
    gone = await scaler.look()
    assert gone == ["post-rollout-b", "post-rollout-c"]
    fleet = new_fleet()
    _, address = await servers(fleet)
    link = SupervisorLink("kubernetes", address, None, scaler)
    link.start()
    await until(lambda: not link.away, "the stream")
    link.report_gone(gone)

    def told():
        return [
            list(each.hosts_gone.hosts)
            for each in fleet.supervised
            if each.WhichOneof("event") == "hosts_gone"
        ]

    assert await until(told, "the report") == [gone]
    await link.stop()


async def test_the_coordinators_number_of_instances_becomes_a_number_of_pods(
    api, kubernetes, servers, new_fleet, until
):
    fleet = new_fleet()
    _, address = await servers(fleet)
    link = SupervisorLink("kubernetes", address, None, Scaler(kubernetes, {"trainer": 4}))
    link.start()
    asked = {"a": ("TRAINER", 8), "b": ("TRAINER", 6), "c": ("ROLLOUT", 3), "d": ("REWARD", 1)}
    for request, (kind, count) in asked.items():
        number = getattr(fleet_pb2, f"SERVICE_KIND_{kind}")
        scale = fleet_pb2.Scale(request_id=request, kind=number, count=count)
        fleet.supervisor_commands.put_nowait(fleet_pb2.SuperviseResponse(scale=scale))

    def answers():
        told = [each.scale_result for each in fleet.supervised if each.WhichOneof("event") == "scale_result"]
        return {each.request_id: each.error for each in told} if len(told) == len(asked) else None

    found = await until(answers, "four answers")
    await link.stop()
    assert found["a"] == found["c"] == ""
    assert "ask for a multiple of 4" in found["b"]
    assert "reward cannot be scaled here" in found["d"]
    assert api.replicas == {PATH.format(TARGETS["trainer"]): 2, PATH.format(TARGETS["rollout"]): 3}
    (table,) = [each.processes for each in fleet.supervised if each.WhichOneof("event") == "processes"][:1]
    assert len(table.scalable_kinds) == 2 and not table.processes


def test_a_refusal_says_whose_it_is_and_what_is_missing(api, kubernetes, tmp_path):
    api.refuse = 403, 'deployments.apps "post-rollout" is forbidden'
    assert "its Role needs `patch` on the subresource scale" in kubernetes.scale("rollout", 2)
    api.refuse = 422, "spec.replicas: exceeded quota: gpus"
    assert "Kubernetes refuses (422): spec.replicas: exceeded quota: gpus" in kubernetes.scale("rollout", 99)
    (tmp_path / "token").write_text("old")
    assert "Kubernetes refuses (401): Unauthorized" in kubernetes.scale("rollout", 2)
    away = Kubernetes("http://127.0.0.1:9", TARGETS, tmp_path)
    assert "http://127.0.0.1:9 cannot be asked" in away.scale("rollout", 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--targets", "rollout=pods/x"], "write deployments/NAME or statefulsets/NAME"),
        (["--instances", "trainer=all"], "write KIND=NUMBER"),
        (["--token-file", "/nowhere"], "token file /nowhere"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments, words, capsys):
    assert main(["kubernetes", "--api", "http://127.0.0.1:9", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert numbers_of("trainer=4,rollout=1") == {"trainer": 4, "rollout": 1}
