"""config.json of a hub's id: of a cache as huggingface_hub itself makes it, of a hub, or of neither."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import huggingface_hub
import pytest
from headrace_schema import hub
from headrace_schema.model_size import model_config, text_config, unread_config
from headrace_schema.sections.generating import ModelSection

CONFIG = {"model_type": "qwen2", "hidden_size": 64}
MODEL = "Qwen/Qwen2.5-7B"


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does, for one model of two revisions."""

    def do_GET(self):
        """Of `OWNER/NAME/resolve/REVISION/config.json`."""
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        known = {f"/{MODEL}/resolve/{each}/config.json": each for each in ("main", "other")}
        body = json.dumps(CONFIG | {"of": known.get(self.path)}).encode()
        self.send_response(200 if self.path in known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"' + "a" * 40 + '"')
        self.send_header("X-Repo-Commit", "c" * 40)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_):
        """Nothing."""


@pytest.fixture
def served(monkeypatch, tmp_path):
    """A hub on the loopback, and an empty cache."""
    server = HTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # read as it was imported
    monkeypatch.setattr(hub, "_known", {})
    yield server
    server.shutdown()
    server.server_close()


def test_what_huggingface_hub_has_downloaded_is_read_without_asking(served, tmp_path, monkeypatch):
    for revision in (None, "other"):
        huggingface_hub.hf_hub_download(
            MODEL,
            "config.json",
            revision=revision,
            cache_dir=tmp_path / "cache",
            endpoint=f"http://127.0.0.1:{served.server_port}",
        )
    served.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    section = ModelSection(path=MODEL)
    assert model_config(section)["hidden_size"] == 64 and unread_config(section) == ""
    assert model_config(ModelSection(path=MODEL, revision="c" * 40))["hidden_size"] == 64, "by its commit"
    assert served.asked == []


def test_without_a_cache_the_hub_is_asked_once_and_with_the_users_token(served, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for _ in range(3):
        assert text_config(ModelSection(path=MODEL))["of"] == "main"
    assert text_config(ModelSection(path=MODEL, revision="other"))["of"] == "other"
    assert served.asked == [
        (f"/{MODEL}/resolve/{each}/config.json", "Bearer hf_secret") for each in ("main", "other")
    ]


def test_what_is_neither_here_nor_there_is_empty_with_the_reason_and_remembered(served, monkeypatch):
    nobody = ModelSection(path="nobody/nothing")
    assert model_config(nobody) == {} == model_config(nobody)
    assert "answers 404" in unread_config(nobody) and len(served.asked) == 1
    monkeypatch.setenv("HF_HUB_OFFLINE", "yes")
    assert unread_config(ModelSection(path="nobody/else")) == "HF_HUB_OFFLINE is set"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be asked" in unread_config(ModelSection(path="nobody/listens"))
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc")
    assert "no address" in unread_config(ModelSection(path="nobody/reads"))
    assert len(served.asked) == 1


def test_directories_and_other_words_are_never_asked_of_the_hub(served, tmp_path, monkeypatch):
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path in ("owner/name", str(folder), "tiny", "./tiny", "a/b/c"):
        assert model_config(ModelSection(path=path)) == {} and unread_config(ModelSection(path=path)) == ""
    (folder / "config.json").write_text(json.dumps({"text_config": CONFIG}))
    assert text_config(ModelSection(path="owner/name")) == CONFIG
    assert served.asked == []
