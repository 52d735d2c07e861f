"""docs/at-size.md shows what was measured, and the whole of it."""

from __future__ import annotations

from pathlib import Path

from _memory_rows import SIZES, markdown, name_of, read

ROOT = Path(__file__).resolve().parents[2]
ROWS = read(ROOT / "benchmarks" / "data" / "memory_at_size.json")
PLANNED_ALONE = {
    "qwen2.5-7b_8_lora",
    "llama-3-70b_1_lora",
    *(f"qwen3-30b-a3b_{ranks}_lora" for ranks in (1, 32, 64)),
}
"""Rows that were not measured yet."""


def test_the_page_has_the_table_of_the_measured_rows():
    assert markdown(ROWS) in (ROOT / "docs" / "at-size.md").read_text(encoding="utf-8")


def test_every_model_is_measured_on_every_number_of_gpus_and_the_plan_holds():
    wanted = {
        f"{model}_{ranks}_{kind}" for model in SIZES for ranks in (1, 8, 32, 64) for kind in ("all", "lora")
    }
    wanted |= {f"qwen3-30b-a3b_{ranks}_experts" for ranks in (8, 32, 64)}
    assert wanted == {name_of(row) for row in ROWS}
    assert wanted - PLANNED_ALONE == {name_of(row) for row in ROWS if "measured" in row}
    assert all(abs(row["error"]) <= 0.1 for row in ROWS if "measured" in row)
