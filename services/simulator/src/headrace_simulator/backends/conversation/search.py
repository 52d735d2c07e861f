"""Search over texts of one's own, by BM25 (https://github.com/xhluca/bm25s)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from headrace_servicekit.registry import Options
from pydantic import Field, PositiveInt


class SearchOptions(Options):
    """What is searched."""

    corpus: Path = Field(description="a .jsonl file with one text a line, or a folder that bm25s has saved")
    text: str = Field("text", description="the key of a line's text")
    results: PositiveInt = Field(3, description="texts of an answer")
    longest: PositiveInt = Field(1000, description="characters of each text that are shown")


def search_tool(options: SearchOptions) -> Callable[[str], str]:
    """The function `search`; ValueError where the corpus cannot be read."""
    index, texts = _index(options.corpus.resolve(), options.text)

    def search(query: str) -> str:
        """Searches for texts that are about the words of the query."""
        import bm25s

        asked = bm25s.tokenize([query], show_progress=False)
        if not asked.vocab:
            return "nothing was found"
        count = min(options.results, len(texts))
        found, scores = index.retrieve(asked, k=count, show_progress=False, n_threads=1)
        pairs = zip(found[0], scores[0], strict=True)
        shown = [f"[{int(row)}] {texts[int(row)][: options.longest]}" for row, score in pairs if score > 0]
        return "\n\n".join(shown) or "nothing was found"

    return search


@lru_cache(maxsize=4)
def _index(corpus: Path, key: str) -> tuple[Any, list[str]]:
    """Made once in a process, as its conversations share it."""
    import bm25s

    if corpus.is_dir():
        index = bm25s.BM25.load(corpus, load_corpus=True)
        return index, [str(each[key] if isinstance(each, dict) else each) for each in index.corpus or []]
    if not corpus.is_file():
        raise ValueError(f"there is no file {corpus}; paths start where the service does")
    texts = []
    for number, line in enumerate(corpus.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            texts.append(row if isinstance(row, str) else str(row[key]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{corpus}:{number} is no JSON with a key {key!r}") from error
    if not texts:
        raise ValueError(f"{corpus} is empty")
    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    return index, texts
