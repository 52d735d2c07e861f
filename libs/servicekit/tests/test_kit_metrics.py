"""What every process's figures say of its surroundings."""

import datetime

from headrace_servicekit.rpc import metrics
from headrace_servicekit.rpc.certificates import make_authority, make_certificate
from prometheus_client import REGISTRY


def figure(name, **labels):
    return REGISTRY.get_sample_value(name, labels)


def test_a_build_names_itself():
    found = [each.samples for each in metrics.MACHINE.collect() if each.name == "headrace_build_info"]
    assert [(sample.value, set(sample.labels)) for sample in found[0]] == [(1, {"version", "python"})]


def test_the_disks_of_folders_are_shown_and_one_that_is_gone_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics.MACHINE, "folders", {})
    metrics.watch({metrics.CHECKPOINTS: tmp_path, metrics.WEIGHTS: None, "gone": tmp_path / "gone"})
    free = figure("headrace_disk_free_bytes", folder="checkpoints")
    assert 0 < free <= figure("headrace_disk_size_bytes", folder="checkpoints")
    assert figure("headrace_disk_free_bytes", folder="weights") is None
    assert figure("headrace_disk_free_bytes", folder="gone") is None


def test_certificates_say_when_they_end(tmp_path, monkeypatch):
    make_authority(tmp_path, "127.0.0.1")
    make_certificate(tmp_path, tmp_path, "rollout", "a")
    monkeypatch.setenv("HEADRACE_TLS_DIR", str(tmp_path))
    now = datetime.datetime.now(datetime.UTC).timestamp()
    host, authority = (
        figure("headrace_certificate_end_seconds", certificate=name) for name in ("host", "authority")
    )
    assert 6 * 86400 < host - now < 8 * 86400 < authority - now
    (tmp_path / "host.pem").write_text("no certificate")
    assert figure("headrace_certificate_end_seconds", certificate="host") is None
    monkeypatch.delenv("HEADRACE_TLS_DIR")
    assert figure("headrace_certificate_end_seconds", certificate="authority") is None
