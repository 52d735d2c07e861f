"""Every command of docs/kubernetes.md, as far as it goes without a cluster."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml
from harness.chart import CHART, certificate_secrets, helm, objects_of
from harness.processes import ROOT

PAGE = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
SHORT = {"service": "Service", "secret": "Secret", "deployment": "Deployment", "statefulset": "StatefulSet"}


def commands():
    """The page's command lines, of each block of a console, with their continuations."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL):
        assert all(line.startswith(("$ ", "    ")) for line in block.splitlines()), block
        found += [line[2:] for line in block.replace("\\\n", " ").splitlines()]
    return found


def of(program):
    return [command for command in commands() if re.search(rf"(^|\(){program} ", command)]


@pytest.mark.parametrize("command", of("helm"))
def test_helm_renders_what_the_page_says(tools, command):
    verb, words = (given := shlex.split(command))[1], given[2:]
    assert given[0] == "helm" and verb in ("install", "upgrade", "template")
    assert words[:2] == ["post", str(CHART.relative_to(ROOT))]
    flags = [word for word in words[2:] if word != "--create-namespace"]
    namespace = flags.index("--namespace")
    assert flags[namespace + 1] == "training", "what the page's other commands ask"
    flags = [word for at, word in enumerate(flags) if at not in (namespace, namespace + 1)]
    flags = [str(ROOT / word) if word.startswith("deploy/") else word for word in flags]
    objects = objects_of(helm(tools, *flags, cluster=verb != "template"))
    assert {"Deployment", "StatefulSet", "NetworkPolicy"} <= {each["kind"] for each in objects}
    for text in re.findall(r"--set '?([\w.\[\]]+=[\w./-]+)", command):
        assert text.rpartition("=")[2] in yaml.safe_dump(objects) or text.startswith(
            ("podSecurity", "usersCode", "ingress.enabled", "tls.http")
        )


@pytest.mark.parametrize("command", of("kubectl"))
def test_kubectl_names_what_the_chart_has_made(render, command):
    objects = {(each["kind"], each["metadata"]["name"]): each for each in render("8-gpu")}
    command = (
        re.sub(r"^export \w+=\$\((.*)\)$", r"\1", command)
        .partition(" | ")[0]
        .removesuffix(" &")
        .partition(" >")[0]
    )
    words = shlex.split(re.sub(r"\$\([^)]*\)", "x", command))
    assert words[0] == "kubectl"
    verbs = [word for word in words[1:] if not word.startswith("-") and word != "training"]
    match verbs:
        case ["port-forward", target, port]:
            kind, _, name = target.partition("/")
            assert int(port) in [each["port"] for each in objects[SHORT[kind], name]["spec"]["ports"]]
        case ["get", "secret", name, path]:
            key = path.removeprefix("jsonpath={.data.").removesuffix("}").replace("\\.", ".")
            made = name in certificate_secrets(list(objects.values()))
            held = {"ca.crt"} if made else objects["Secret", name]["data"].keys()
            assert key in held and "-o" in words
        case ["create", "secret", "generic", name]:
            made = {word.split("=")[1] for word in words if word.startswith("--from-literal=")}
            assert made == objects["Secret", name]["data"].keys()
        case ["scale" | "rollout", *_, target]:
            kind, _, name = target.partition("/")
            assert (SHORT[kind], name) in objects
        case ["label", "namespace", label]:
            assert label == "pod-security.kubernetes.io/enforce=privileged"
        case ["apply", file]:
            assert f"# {file};" in PAGE
        case _:
            pytest.fail(f"nobody checks: {command}")


def test_every_command_of_the_page_is_checked_somewhere():
    """`headrace …` by integration_tests/packaging/test_docs.py."""
    other = [each for each in commands() if each not in of("helm") + of("kubectl")]
    assert all(each.startswith(("headrace ", "export HEADRACE_URL=")) for each in other), other
    assert len(of("helm")) >= 10 and len(of("kubectl")) >= 6


def test_objects_of_the_page_are_what_the_chart_asks_for_and_values_are_taken(tools, tmp_path):
    """The coordinator's certificate has the names by which instances, users and KEDA know it."""
    blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    (shown,) = [each["spec"] for each in blocks if "kind" in each]
    (tmp_path / "values.yaml").write_text(yaml.safe_dump_all(each for each in blocks if "kind" not in each))
    objects_of(helm(tools, "--values", tmp_path / "values.yaml"))
    objects = objects_of(helm(tools, "--set=tls.http=true,autoscaling.rollout.by=keda"))
    (made,) = [
        each["spec"]
        for each in objects
        if each["kind"] == "Certificate" and each["metadata"]["name"] == "post-tls-coordinator"
    ]
    assert shown == made
    (scaled,) = [each for each in objects if each["kind"] == "ScaledObject"]
    url = scaled["spec"]["triggers"][0]["metadata"]["url"]
    assert re.match(r"https://([^:]+):", url)[1] in made["dnsNames"]


def test_keys_that_the_page_names_are_values():
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    others = {"tls.crt", "tls.key", "rollout.instances"}
    """Keys of a secret, and of the run spec."""
    named = set(re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z]+)+)(?::[^`]*)?`", PAGE)) - others
    known = {name for name in named if name.split(".")[0] in values}
    assert len(known) > 20
    wrong = []
    for name in known:
        found = values
        for part in name.split("."):
            found = {**values["pod"], **found} if found is not values else found
            if part not in found:
                wrong.append(name)
                break
            if part == "env":
                break
            found = found[part] if isinstance(found[part], dict) else {}
    assert not wrong, wrong
