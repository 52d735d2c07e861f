"""All strings of n digits, to be copied: "123=" → "123". What a tiny model learns in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from typing_extensions import override

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.data.sources import DataSource


class CopyDigits(DataSource):
    """10 ** digits items."""

    digits: Annotated[int, Field(strict=True, ge=1, le=5, description="digits of a string")] = 3

    @override
    def items(self) -> Iterator[DataItem]:
        """Yields the strings in numeric order."""
        for number in range(10**self.digits):
            text = f"{number:0{self.digits}d}"
            yield DataItem(question=f"{text}=", answer=text, fields={"digits": text})
