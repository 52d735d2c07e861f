"""The contracts: the checked-in code is what the sources make, and nothing breaks the baseline."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROTO = Path(__file__).parents[1]
SOURCES = PROTO / "src"
BASELINE = PROTO / "baseline.binpb"
BUF = Path(sys.executable).with_name("buf")


def buf(*arguments, cwd=PROTO):
    return subprocess.run([BUF, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60)


def generated(root):
    paths = [*root.rglob("*_pb2*.py"), *root.rglob("*_pb2.pyi")]
    return {path.relative_to(root): path.read_bytes() for path in paths}


def test_the_generated_code_is_what_the_sources_make(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run(["sh", PROTO / "generate.sh", tmp_path], env=environment, check=True, timeout=60)
    fresh, checked_in = generated(tmp_path), generated(SOURCES)
    assert fresh.keys() == checked_in.keys() and fresh
    stale = [str(path) for path in fresh if fresh[path] != checked_in[path]]
    assert not stale, f"run `PYTHON=.venv/bin/python proto/generate.sh`; stale: {stale}"


def test_the_sources_pass_buf_lint():
    found = buf("lint")
    assert found.returncode == 0, found.stdout + found.stderr


def test_nothing_breaks_the_baseline():
    found = buf("breaking", "--against", str(BASELINE))
    assert found.returncode == 0, (
        f"{found.stdout}{found.stderr}\nproto/README.md says when and how to renew the baseline"
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("int64 lease_epoch = 4;", "int64 lease_epoch = 5;"),
        ("string request_id = 1;", "int64 request_id = 1;"),
        ("FINISH_REASON_ERROR = 8;", "FINISH_REASON_BROKEN = 8;"),
    ],
)
def test_the_baseline_catches_a_breaking_change(tmp_path, old, new):
    for path in (*SOURCES.rglob("*.proto"), PROTO / "buf.yaml"):
        copy = tmp_path / path.relative_to(PROTO)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    common = tmp_path / "src/headrace/common/v1/common.proto"
    text = common.read_text()
    assert text.count(old) == 1
    common.write_text(text.replace(old, new))
    assert buf("breaking", "--against", str(BASELINE), cwd=tmp_path).returncode != 0


def test_no_package_file_splits_the_namespace():
    assert not (SOURCES / "headrace" / "__init__.py").exists()
