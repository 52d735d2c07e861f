"""docker-compose.yml and what is put on top of it, as Docker's own renderer understands them; no engine is needed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.processes import ROOT, clean_environment
from headrace_servicekit.lease import devices
from headrace_servicekit.lease.gpus import Nvidia, find_gpus

OVERLAY = ("-f", "docker-compose.yml", "-f", "deploy/compose.gpu.yaml")


@pytest.fixture
def render(tools):
    """`render(argument, …, VARIABLE=value)`: the services and volumes that compose makes of the files."""

    def rendered(*arguments, **variables):
        command = [tools / "docker-compose", *arguments, "config", "--format", "json"]
        environment = clean_environment(PWD=str(ROOT), **variables)
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return rendered


def test_the_gpu_overlay_gives_trainers_a_host_with_a_rank_for_each_of_its_gpus(render):
    found = render(
        *OVERLAY, HEADRACE_TRAINER_GPUS="0,1,2,3", HEADRACE_ROLLOUT_GPUS="4,5", TORCH_INDEX_URL="cpu"
    )
    services = found["services"]
    assert services["trainer"]["environment"]["HEADRACE_COUNT"] == "devices"
    assert "HEADRACE_COUNT" not in services["rollout"]["environment"], (
        "an engine has the GPUs of its container"
    )
    for name, gpus in (("trainer", "0,1,2,3"), ("rollout", "4,5")):
        service = services[name]
        assert service["environment"]["CUDA_VISIBLE_DEVICES"] == gpus
        (reserved,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (reserved["driver"], reserved["count"]) == ("nvidia", -1)
        assert service["image"] == f"headrace/{name}:latest-gpu"
        assert service["build"]["args"]["TORCH_INDEX_URL"] == "", (
            "not the CPU index that TORCH_INDEX_URL may name"
        )
        wheels = [
            services[other]["build"]["additional_contexts"]["wheels"] for other in (name, "coordinator")
        ]
        assert wheels[0] != wheels[1]
        assert int(service["shm_size"]) == 16 * 1024**3
        assert service["ulimits"]["memlock"] == -1
        mounted = {volume["target"] for volume in service["volumes"]}
        caches = {value for key, value in service["environment"].items() if "CACHE" in key}
        assert {"/cache", "/weights", "/secrets/fleet"} <= mounted and all(
            path.startswith("/cache") for path in caches
        )
    assert "size=50%" in found["volumes"]["weights"]["driver_opts"]["o"]


def machine(root, gpus):
    """A container that sees all GPUs of a machine, as the kernel and the driver show them."""
    (root / "dev").mkdir()
    (root / ".dockerenv").touch()
    for number in range(gpus):
        folder = root / f"proc/driver/nvidia/gpus/0000:{number:02}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"GPU UUID: \t GPU-{number}\nDevice Minor: \t {number}\n")
        (root / f"dev/nvidia{number}").touch()
    return Nvidia(root, lambda *_: "")


@pytest.mark.parametrize(("visible", "ranks"), [("0,1,2,3", 4), ("6", 1)])
def test_the_trainers_host_starts_as_many_ranks_as_it_sees_gpus(
    render, monkeypatch, tmp_path, visible, ranks
):
    environment = render(*OVERLAY, HEADRACE_TRAINER_GPUS=visible)["services"]["trainer"]["environment"]
    maker = machine(tmp_path, 8)
    monkeypatch.setattr(devices, "_gpus", lambda: find_gpus(environment, (maker,)))
    assert devices.instance_count(environment["HEADRACE_COUNT"]) == ranks


def test_the_scaler_alone_has_the_engines_socket_and_is_not_there_unless_it_is_asked_for(render):
    services = render("--profile", "*")["services"]
    socket = "/var/run/docker.sock"
    holders = [
        name
        for name, service in services.items()
        if any(volume["target"] == socket for volume in service.get("volumes", []))
    ]
    assert holders == ["scaler"] and "scaler" not in render()["services"]
    assert services["scaler"]["entrypoint"] == ["python", "-m", "headrace_servicekit.scaling", "docker"]
    given = services["scaler"]["environment"]
    assert set(given["HEADRACE_SCALER_TARGETS"].split(",")) == {"rollout", "trainer", "reward", "simulator"}
    assert given["HEADRACE_SCALER_PROJECT"] == "headrace", "the project of the file"


def test_measuring_is_a_profile_that_publishes_grafana_alone_on_the_loopback(render):
    plain, measured = render()["services"], render("--profile", "observability")["services"]
    added = measured.keys() - plain.keys()
    assert added == {"prometheus", "tempo", "grafana"}
    assert [name for name in added if "ports" in measured[name]] == ["grafana"]
    assert measured["grafana"]["ports"][0]["host_ip"] == "127.0.0.1"
    for name in added:
        service = measured[name]
        assert (
            service["cap_drop"] == ["ALL"]
            and service["read_only"]
            and service["deploy"]["resources"]["limits"]
        )
        for volume in service["volumes"]:
            assert volume["type"] != "bind" or (ROOT / volume["source"]).exists(), volume["source"]
    held = {volume["target"] for volume in measured["prometheus"]["volumes"] if volume["type"] == "volume"}
    assert "/store" in held and "--storage.tsdb.path=/store" in measured["prometheus"]["command"]
    assert not held & {"/prometheus", "/etc/prometheus"}, (
        "a folder of prom/prometheus: its volume would belong to nobody, and user 10001 could not write"
    )
    assert plain["trainer"]["environment"]["HEADRACE_METRICS_PORT"] == "9100"
    assert plain["trainer"]["environment"]["HEADRACE_OTLP_ENDPOINT"] == "", (
        "no traces unless they are asked for"
    )


def test_services_with_users_code_alone_start_as_root_and_keep_what_their_entry_point_names(render):
    script = (ROOT / "deploy/as_service.sh").read_text()
    kept = set(re.search(r"HEADRACE_CAPABILITIES:-([a-z_ ]+)", script)[1].upper().split())
    for name, service in render("--profile", "*")["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        with_code = name in ("reward", "simulator")
        assert set(service.get("cap_add") or ()) == (kept if with_code else set()), name
        assert (service.get("user") == "0:0") is with_code, name
    stages = (ROOT / "deploy/Dockerfile").read_text().split("\nFROM ")
    starts = [line for stage in stages for line in stage.splitlines() if line.startswith("ENTRYPOINT")]
    with_code = [line for line in starts if re.search(r'"(reward|simulator)"', line)]
    assert with_code and all('["as_service", ' in line for line in with_code)


FLEET, HTTP, REDIS, TLS = "/secrets/fleet", "/secrets/http", "/secrets/redis", "/tls"
ROLES = ("trainer", "rollout", "reward", "simulator", "scaler")
CERTIFIED = {f"/secrets/tls/{role}" for role in ("authority", "coordinator", *ROLES)}
SECRETS = {
    "secrets": {FLEET, HTTP, REDIS, *CERTIFIED},
    "coordinator": {FLEET, HTTP, REDIS, TLS},
    "redis": {REDIS},
    "prometheus": {FLEET, HTTP},
    **{kind: {FLEET, TLS} for kind in ROLES},
}


@pytest.mark.parametrize("overlay", [(), OVERLAY])
def test_a_service_has_the_secrets_that_it_needs_and_no_other(render, overlay):
    for name, service in render(*overlay, "--profile", "*")["services"].items():
        mounted = {
            volume["source"]: volume
            for volume in service.get("volumes", [])
            if "secret" in volume["source"] or volume["target"].startswith(("/secrets", TLS))
        }
        mounted = {key: volume for key, volume in mounted.items() if volume["type"] == "volume"}
        assert {volume["target"] for volume in mounted.values()} == SECRETS.get(name, set()), name
        for source, volume in mounted.items():
            role = source.removesuffix("-tls")
            places = {f"/secrets/{source.removesuffix('-secret')}", f"/secrets/tls/{role}"}
            assert volume["target"] in places or (volume["target"], role) == (TLS, name)
            assert name == "secrets" or volume["read_only"]
        held = {volume["target"] for volume in mounted.values()}
        for key, value in (service.get("environment") or {}).items():
            if key.endswith("_FILE"):
                assert value.rpartition("/")[0] in held, f"{name}: {key} names a secret that it does not have"


def test_the_secrets_of_compose_are_made_where_it_mounts_a_volume_and_nowhere_else(render, tmp_path):
    secrets = render()["services"]["secrets"]
    mounted = {volume["target"] for volume in secrets["volumes"] if "/secrets" in volume["target"]}
    folders = {tmp_path / target.removeprefix("/secrets/") for target in mounted}
    for folder in folders:
        folder.mkdir(parents=True)
    (script,) = secrets["command"]
    script = script.replace("/make_secrets.sh", str(ROOT / "deploy/make_secrets.sh"))
    script = re.sub("(?<= )/secrets", str(tmp_path), script)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [*secrets["entrypoint"], script]
    subprocess.run(command, env=clean_environment(PATH=path), check=True, timeout=60)
    assert {file.parent for file in tmp_path.rglob("*") if file.is_file()} == folders
    image = (ROOT / "deploy/Dockerfile").read_text()
    made = re.search(r"'/secrets/tls/%s ' ([a-z ]+)\)", image)[1].split()
    assert {f"/secrets/tls/{role}" for role in (*made, "authority")} == CERTIFIED, "else root owns its volume"


def test_secrets_are_made_once_in_folders_of_their_own(tmp_path):
    for name in ("fleet", "http", "redis"):
        (tmp_path / name).mkdir()
    script = ["sh", str(ROOT / "deploy/make_secrets.sh"), str(tmp_path)]

    def made():
        subprocess.run(script, check=True, timeout=20)
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
        return {str(path.relative_to(tmp_path)): path.read_text() for path in files}

    first = made()
    assert made() == first and len(set(first.values())) == 4
    assert first.keys() == {
        "fleet/fleet-token",
        "http/http-token",
        "redis/redis-password",
        "redis/redis.conf",
    }
