"""Data sets and suites by their hub ids, from a hub on the loopback that answers for the real names and columns.

Layouts and columns are those that lm-evaluation-harness (aime25, gpqa), lighteval (aime24, gpqa, math_500) and verl
(gsm8k) read; the rows are made up.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def parquet(*rows):
    body = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), body)
    return body.getvalue()


def configs(**files):
    """A data card that says which file is which configuration and split."""
    lines = ["---", "configs:"]
    for name, (split, path) in files.items():
        lines += [f"- config_name: {name}", "  data_files:", f"  - split: {split}", f"    path: {path}"]
    return "\n".join([*lines, "---", ""]).encode()


GPQA = "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3,Record ID\n"
REPOS = {
    "team/toy": {"README.md": b"# toy\n", "train.jsonl": b'{"question": "2+2", "answer": "#### 4"}\n'},
    "openai/gsm8k": {
        "README.md": configs(main=("test", "main/test-*"), socratic=("test", "socratic/test-*")),
        "main/test-00000-of-00001.parquet": parquet({"question": "3+3?", "answer": "It is 6.\n#### 1,006"}),
        "socratic/test-00000-of-00001.parquet": parquet({"question": "why?", "answer": "#### 0"}),
    },
    "HuggingFaceH4/MATH-500": {
        "README.md": b"# math\n",
        "test.jsonl": json.dumps(
            {
                "problem": "Half?",
                "solution": "It is $\\boxed{\\frac{1}{2}}$.",
                "answer": "\\frac{1}{2}",
                "subject": "Algebra",
                "level": 2,
                "unique_id": "test/algebra/1.json",
            }
        ).encode(),
    },
    "HuggingFaceH4/aime_2024": {
        "README.md": configs(default=("train", "data/train-*")),
        "data/train-00000-of-00001.parquet": parquet(
            {"id": 60, "problem": "Walk?", "solution": "s", "answer": "033", "url": "u", "year": "2024"}
        ),
    },
    "math-ai/aime25": {
        "README.md": b"# aime\n",
        "test.jsonl": b'{"problem": "Arcs?", "answer": "336^\\\\circ", "id": "20"}\n',
    },
    "Idavidrein/gpqa": {
        "README.md": configs(
            gpqa_diamond=("train", "gpqa_diamond.csv"), gpqa_main=("train", "gpqa_main.csv")
        ),
        "gpqa_diamond.csv": (GPQA + "Which?,right,wrong,worse,worst,r1\n").encode(),
        "gpqa_main.csv": (GPQA + "Main?,right,wrong,worse,worst,r2\n").encode(),
    },
}


class Hub(BaseHTTPRequestHandler):
    """The few answers of a hub that small data sets need."""

    commit = "0123456789abcdef0123456789abcdef01234567"

    def do_GET(self):
        path = self.path.partition("?")[0]
        name = next((name for name in REPOS if f"/datasets/{name}" in path), "")
        files = REPOS.get(name, {})
        if path.startswith("/api/datasets/") and name:
            if "/tree/" in path:
                inside = path.partition(f"/tree/{self.commit}")[2].strip("/")
                return self._answer(json.dumps(_children(files, inside)))
            siblings = [{"rfilename": file} for file in files]
            return self._answer(
                json.dumps({"id": name, "sha": self.commit, "siblings": siblings, "tags": []})
            )
        file = path.partition("/resolve/")[2].partition("/")[2]
        if file in files:
            return self._answer(files[file])
        return self._answer("{}", status=404, **{"X-Error-Code": "EntryNotFound" if name else "RepoNotFound"})

    do_HEAD = do_GET

    def do_POST(self):
        wanted = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        name = next(name for name in REPOS if f"/datasets/{name}/" in self.path)
        self._answer(
            json.dumps([_entry(REPOS[name], path) for path in wanted if path in _paths(REPOS[name])])
        )

    def _answer(self, body, status=200, **headers):
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        etag = f'"{hash(data) & 0xFFFFFFFF:08x}"'
        for name, value in {"ETag": etag, "X-Repo-Commit": self.commit, **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *arguments):
        pass


def _paths(files):
    return {*files, *(file.rpartition("/")[0] for file in files)} - {""}


def _children(files, folder):
    return [_entry(files, path) for path in sorted(_paths(files)) if path.rpartition("/")[0] == folder]


def _entry(files, path):
    entry = {"path": path, "oid": path.encode().hex()}
    return (
        {**entry, "type": "file", "size": len(files[path])}
        if path in files
        else {**entry, "type": "directory"}
    )


@pytest.fixture(scope="module")
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run(code, hub, home, *arguments):
    """In a process of its own: the library reads HF_ENDPOINT when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_TOKEN": "", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


SOURCES = """
import sys
from headrace_coordinator.data.sources import open_source
from headrace_schema.problems import Impossible
for name in sys.argv[1:]:
    try:
        options = {'dataset': name, 'form': 'gsm8k'}
        print([(i.question, i.answer) for i in open_source('huggingface', options).items()])
    except Impossible as error:
        print(error)
"""
SUITES = """
import json, sys
from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.suites import open_suite
found = {name: Dataset.open(open_suite(name, {}).data(), 0).asked() for name in sys.argv[1:]}
print(json.dumps({name: [(i.question, i.answer) for i in items] for name, items in found.items()}))
"""


def test_a_data_set_comes_from_the_hub_that_hf_endpoint_names(hub, tmp_path):
    told = run(SOURCES, hub, tmp_path, "team/toy", "team/none")
    first, second = told.stdout.splitlines()[:2]
    assert first == "[('2+2', '4')]", told.stderr[-2000:]
    assert "data.options.dataset" in second and "team/none" in second, told


def test_the_suites_find_their_data_sets_by_id_configuration_split_and_columns(hub, tmp_path):
    told = run(SUITES, hub, tmp_path, "gsm8k", "math500", "aime24", "aime25", "gpqa_diamond")
    assert told.returncode == 0, told.stderr[-3000:]
    found = json.loads(told.stdout.splitlines()[-1])
    [[question, letter]] = found.pop("gpqa_diamond")
    assert question.startswith("Which?\n\nA) ") and f"{letter}) right" in question
    assert found == {
        "gsm8k": [["3+3?", "1006"]],
        "math500": [["Half?", "\\frac{1}{2}"]],
        "aime24": [["Walk?", "33"]],
        "aime25": [["Arcs?", "336"]],
    }


@pytest.mark.parametrize("whole", [True, False], ids=["one split", "a dictionary of splits"])
def test_what_save_to_disk_wrote_is_read(tmp_path, whole):
    import datasets
    from headrace_coordinator.data.builtin.huggingface import HuggingFace
    from headrace_schema.problems import Impossible

    rows = datasets.Dataset.from_list([{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(4)])
    (rows if whole else datasets.DatasetDict({"train": rows, "test": rows.select([0])})).save_to_disk(
        tmp_path / "d"
    )
    source = HuggingFace(dataset=str(tmp_path / "d"), split="train[1:3]")
    assert [item.answer for item in source.items()] == ["2", "3"]
    if not whole:
        with pytest.raises(Impossible, match="Unknown split 'validation'"):
            list(HuggingFace(dataset=str(tmp_path / "d"), split="validation").items())
