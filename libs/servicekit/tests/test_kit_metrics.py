"""What every process's figures say of its surroundings."""

import datetime
import http.client
import socket
import ssl

import pytest
from cryptography import x509
from headrace_servicekit.rpc import metrics
from headrace_servicekit.rpc.certificates import make_authority, make_certificate
from headrace_servicekit.rpc.tls import AUTHORITY, INSTANCE_NAME
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


class Scraper(http.client.HTTPSConnection):
    """As Prometheus scrapes: by an address, with the name of an instance."""

    def connect(self):
        http.client.HTTPConnection.connect(self)
        self.sock = self._context.wrap_socket(self.sock, server_hostname=INSTANCE_NAME)
        self.serial = x509.load_der_x509_certificate(self.sock.getpeercert(True)).serial_number


def test_beyond_the_loopback_figures_are_encrypted_by_the_newest_certificate(tmp_path, monkeypatch):
    make_authority(tmp_path, "127.0.0.1")
    make_certificate(tmp_path, tmp_path, "rollout", "a")
    monkeypatch.setenv("HEADRACE_TLS_DIR", str(tmp_path))
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    stop = metrics.expose_metrics("0.0.0.0", port, "secret")
    try:
        plain = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with pytest.raises((http.client.HTTPException, OSError)):
            plain.request("GET", "/metrics", headers={"Authorization": "Bearer secret"})
            plain.getresponse()
        serials = []
        for _ in range(2):
            context = ssl.create_default_context(cafile=tmp_path / AUTHORITY)
            scraper = Scraper("127.0.0.1", port, timeout=10, context=context)
            scraper.request("GET", "/metrics", headers={"Authorization": "Bearer secret"})
            answer = scraper.getresponse()
            assert answer.status == 200 and b"headrace_build_info" in answer.read()
            scraper.close()
            serials.append(scraper.serial)
            make_certificate(tmp_path, tmp_path, "rollout", "a")
        assert serials[0] != serials[1], "a certificate that was renewed is shown without a restart"
    finally:
        stop()
