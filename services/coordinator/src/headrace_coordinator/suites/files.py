"""Suites whose items are rows of a file or of a Hugging Face data set: GSM8K, MATH-500, AIME, GPQA-diamond."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from headrace_schema.sections.generating import DataSection, PromptSection
from headrace_schema.sections.scoring import RewardSection, ScorerSection
from pydantic import Field
from typing_extensions import override

from headrace_coordinator.suites.base import Suite
from headrace_coordinator.suites.extracting import CHOICE, last_box, last_choice, last_number, plain_math

BOXED = "{question}\n\nReason step by step, and put your final answer within \\boxed{{}}."


class FileSuite(Suite):
    """Rows of `path` (.jsonl, .parquet, or a folder of .parquet files), else of a data set of the hub."""

    path: str | None = Field(default=None, description="local file; default: the data set")
    dataset: str = Field(default="", description="a data set's id, or its local directory")
    config: str | None = Field(default=None, description="configuration of the data set")
    split: str = Field(default="test", description="split of the data set")
    revision: str | None = Field(default=None, description="commit, tag or branch of the data set")

    form: ClassVar[str]
    template: ClassVar[str] = BOXED
    one_answer: ClassVar[bool] = True

    @override
    def data(self) -> DataSection:
        prompt = PromptSection(template=self.template)
        if self.path is None:
            hub: dict[str, Any] = {"dataset": self.dataset, "name": self.config, "split": self.split}
            options = {**hub, "revision": self.revision, "form": self.form}
            return DataSection(source="huggingface", options=options, prompt=prompt)
        parquet = self.path.endswith(".parquet") or Path(os.path.expanduser(self.path)).is_dir()
        source = "parquet" if parquet else "jsonl"
        return DataSection(source=source, options={"path": self.path, "form": self.form}, prompt=prompt)

    @override
    def key(self, data_key: str) -> str:
        return super().key(data_key).replace("suite.options.name", "suite.options.config")

    @override
    def reward(self) -> RewardSection:
        """Mathematical equality with the reference."""
        return RewardSection(scorers=[ScorerSection(name="math_verify")])

    @override
    def extract(self, completion: str) -> str:
        return plain_math(last_box(completion))


class Gsm8k(FileSuite):
    """GSM8K (Cobbe et al. 2021): grade-school word problems, judged by the last number."""

    dataset: str = "openai/gsm8k"
    config: str | None = "main"
    form: ClassVar[str] = "gsm8k"
    template: ClassVar[str] = "{question}\n\nReason step by step, and end with the answer as a number."

    @override
    def reward(self) -> RewardSection:
        """The last number is the reference's."""
        return RewardSection(scorers=[ScorerSection(name="last_number")])

    @override
    def extract(self, completion: str) -> str:
        return last_number(completion)


class Math500(FileSuite):
    """MATH-500 (Lightman et al. 2023): competition problems, judged by mathematical equality."""

    dataset: str = "HuggingFaceH4/MATH-500"
    form: ClassVar[str] = "math"


class Aime24(FileSuite):
    """AIME 2024: thirty problems whose answers are integers from 0 to 999."""

    dataset: str = "HuggingFaceH4/aime_2024"
    split: str = "train"
    form: ClassVar[str] = "aime"


class Aime25(FileSuite):
    """AIME 2025: thirty problems whose answers are integers from 0 to 999."""

    dataset: str = "math-ai/aime25"
    form: ClassVar[str] = "aime"


class GpqaDiamond(FileSuite):
    """GPQA-diamond (Rein et al. 2023): four choices in an order of each question's own, judged by the letter."""

    dataset: str = "Idavidrein/gpqa"
    config: str | None = "gpqa_diamond"
    split: str = "train"
    form: ClassVar[str] = "gpqa"
    template: ClassVar[str] = (
        "{question}\n\nReason step by step. End with a line of the form 'Answer: X', where X is A, B, C or D."
    )

    @override
    def reward(self) -> RewardSection:
        """The last letter that the answer states is the reference's."""
        return RewardSection(scorers=[ScorerSection(name="capture", options={"pattern": CHOICE})])

    @override
    def extract(self, completion: str) -> str:
        return last_choice(completion)
