"""Who the pods of the Helm chart are to each other, whose tokens they take, and what users' code may do in them."""

from __future__ import annotations

import shutil

import pytest
from harness.chart import variables, workloads
from headrace_coordinator.access.issuer import read_issuer
from headrace_coordinator.access.trust import read_trust
from headrace_servicekit.contained.settings import PREFIX, ContainedSettings
from headrace_servicekit.rpc.certificates import (
    certify,
    check_files,
    make_authority,
    put_certificate,
    request_certificate,
)
from headrace_servicekit.rpc.tls import own_fleet


@pytest.mark.parametrize("http", ["false", "true"])
def test_every_pod_has_the_certificate_of_its_role_alone(render, http):
    given = f"--set=tls.existing=ours,tls.http={http},scaler.enabled=true,metrics.monitors=true"
    objects = render("8-gpu", given)
    assert not [each for each in objects if each["kind"] in ("Certificate", "Issuer")]
    for kind, pod in workloads(objects).items():
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        files = [each["secret"] for each in spec["volumes"] if each["name"] == "tls"]
        if kind in ("redis", "models"):
            assert not files
            continue
        (secret,) = files
        assert secret["secretName"] == f"ours-{kind}"
        assert {item["key"]: item["path"] for item in secret["items"]} == {
            "ca.crt": "ca.pem",
            "tls.crt": "host.pem",
            "tls.key": "host-key.pem",
        }
        given = variables(pod)
        assert given["HEADRACE_TLS_DIR"] == "/tls"
        assert given.get("HEADRACE_ENCRYPT_ALL", "") == ("1" if http == "true" else "")
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container.get(probe, {})
            assert "grpc" not in asked, f"{kind}: kubelet's own probe shows no certificate"
            assert ("scheme" in asked.get("httpGet", {})) is ("httpGet" in asked and http == "true")
    (monitor,) = [each for each in objects if each["kind"] == "ServiceMonitor"]
    assert monitor["spec"]["endpoints"][0].get("scheme", "http") == ("https" if http == "true" else "http")


@pytest.mark.parametrize("issuer", ["", "ours"])
def test_cert_manager_is_asked_for_a_certificate_that_the_services_take(
    render, issuer, tmp_path, monkeypatch
):
    """What it is asked for, signed by an authority, is what a server of that role checks itself by."""
    objects = render("", f"--set=tls.issuer.name={issuer}")
    asked = [each["spec"] for each in objects if each["kind"] == "Certificate"]
    issuers = {each["metadata"]["name"] for each in objects if each["kind"] == "Issuer"}
    assert issuers == (set() if issuer else {"post-self-signed", "post-authority"})
    mounted = {
        volume["secret"]["secretName"]: kind
        for kind, pod in workloads(objects).items()
        for volume in pod["spec"]["volumes"]
        if volume["name"] == "tls"
    }
    roles = [each for each in asked if not each.get("isCA")]
    assert mounted.keys() <= {each["secretName"] for each in roles}
    make_authority(tmp_path / "authority", "post-coordinator", "post")
    for spec in roles:
        assert spec["issuerRef"]["name"] == (issuer or "post-authority")
        names = [name for name in spec["dnsNames"] if name != "post-coordinator.training"]
        role = spec["secretName"].removeprefix("post-tls-")
        request = request_certificate(tmp_path / role, [*spec["uris"], *names])
        shutil.copy(tmp_path / "authority/ca.pem", tmp_path / role)
        put_certificate(tmp_path / role, certify(tmp_path / "authority", request))
        check_files(tmp_path / role, role)
        assert mounted.get(spec["secretName"], role) == role
        monkeypatch.setenv("HEADRACE_TLS_DIR", str(tmp_path / role))
        assert own_fleet() == "post"


def files_of(objects, tmp_path):
    """The coordinator's pod, and its files at /access as they are mounted."""
    pod = workloads(objects)["coordinator"]
    (name,) = (each["configMap"]["name"] for each in pod["spec"]["volumes"] if each["name"] == "access")
    (given,) = (each["data"] for each in objects if each["metadata"]["name"] == name)
    for file, text in given.items():
        (tmp_path / file).write_text(text)
    mounts = {each["name"]: each["mountPath"] for each in pod["spec"]["containers"][0]["volumeMounts"]}
    return pod, lambda path: tmp_path / path.removeprefix(f"{mounts['access']}/")


def test_the_coordinator_takes_the_tokens_of_the_issuer_that_the_values_name(render, tmp_path):
    issuer = "oidc.issuer=https://login.example.com,oidc.audience=headrace,oidc.scopes.admin={grp-platform}"
    pod, at = files_of(render("", f"--set={issuer}"), tmp_path)
    found = read_issuer(at(variables(pod)["HEADRACE_OIDC"])).config
    assert (found.issuer, found.audience) == ("https://login.example.com", "headrace")
    assert found.scopes == {"admin": ["grp-platform"]}
    assert "HEADRACE_TRUST" not in variables(pod)


def test_a_contained_fleet_allows_what_the_values_say_and_contains_users_code(render, tmp_path):
    values = (
        "usersCode.trust=contained,usersCode.network=best_effort,usersCode.reach={judge.internal:443,*.x.com}"
    )
    allow = '--set-json=usersCode.allow={"reward.scorers.name":["/srv/scorers.py:*"]}'
    objects = render("", f"--set={values},simulator.replicas=1", allow)
    pod, at = files_of(objects, tmp_path)
    given = variables(pod)
    trust = read_trust(given["HEADRACE_TRUST"], at(given["HEADRACE_TRUST_ALLOW"]))
    for scorer, refused in (("/srv/scorers.py:score", 0), ("/srv/other.py:score", 1)):
        spec = {"reward": {"scorers": [{"name": scorer}]}}
        assert len(list(trust.problems(spec))) == refused, scorer
    for kind, template in workloads(objects).items():
        given = variables(template)
        assert ("HEADRACE_TRUST" in given) is (kind in ("coordinator", "reward", "simulator")), kind
        if kind in ("reward", "simulator"):
            names = ContainedSettings.model_fields
            settings = ContainedSettings.model_validate(
                {name: given[key] for name in names if (key := f"{PREFIX}{name.upper()}") in given}
            )
            assert settings.reach == ("judge.internal:443", "*.x.com")
            assert settings.network == "best_effort"


def test_the_coordinators_pod_is_made_anew_where_its_files_change(render):
    first, second = (
        workloads(render("", "--set=usersCode.trust=contained", f"--set-json=usersCode.allow={allow}"))
        for allow in ('{"*":["/data/a"]}', '{"*":["/data/b"]}')
    )
    assert first["coordinator"]["metadata"] != second["coordinator"]["metadata"]
    assert first["reward"]["metadata"] == second["reward"]["metadata"]
