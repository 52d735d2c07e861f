"""Every form of a checkpoint's own files is read by this commit as it was written by those before.

A form that changes needs the checkpoints of running fleets to be thought of, and then:
python services/trainer/tests/test_trainer_checkpoint_forms.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from headrace_trainer.checkpoints.parts import all_files
from headrace_trainer.checkpoints.state import (
    LEDGER,
    MANIFEST,
    Claim,
    Damaged,
    State,
    read_claim,
    read_state,
    seal,
)

GOLDEN = Path(__file__).parent / "golden" / "checkpoint"
FILE = {"size": 12, "digest": "0" * 32}
STATE = {
    "format": 2,
    "version": {"number": 7, "parent": 6, "ordinal": 5, "digest": "ab"},
    "lineage": {"3": 2, "7": 5},
    "optimizer_steps": 5,
    "store_id": "store",
    "torch": "2.13.0",
    "files": dict.fromkeys((*all_files(2), LEDGER, MANIFEST), FILE),
    "base": "lineage-1/step-3",
    "base_run": "run",
    "reference": {"name": "reference", "digest": "cd"},
    "base_model": {"name": "base", "digest": "ef"},
    "algorithm_state": {"kl": 0.5},
}
CLAIM = {
    "base_checkpoint": "lineage-1/step-3",
    "reserved_numbers": [8, 9],
    "store_id": "store",
    "base_run": "run",
}
FORMS = {"state.json": (read_state, State, STATE), "lineage-2.json": (read_claim, Claim, CLAIM)}


@pytest.mark.parametrize("name", FORMS)
def test_a_file_is_read_and_nothing_of_it_is_lost(name):
    read, model, written = FORMS[name]
    found = read(GOLDEN / name).model_dump(mode="json", exclude={"digest"})
    assert json.loads(json.dumps(found)) == written
    assert written.keys() | {"digest"} == model.model_fields.keys(), (
        "a field that was added stands in the file too"
    )


@pytest.mark.parametrize("name", FORMS)
def test_a_changed_byte_is_found(name, tmp_path):
    read, _, _ = FORMS[name]
    (tmp_path / name).write_bytes((GOLDEN / name).read_bytes().replace(b"store", b"stole"))
    with pytest.raises(Damaged):
        read(tmp_path / name)


if __name__ == "__main__":
    for name, (_, _, written) in FORMS.items():
        (GOLDEN / name).write_bytes(seal(written))
