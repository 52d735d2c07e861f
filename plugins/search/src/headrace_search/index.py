"""An index of texts on disk: found by their words (BM25), by their meaning (vectors of a model), or by both.

It is built once. Whoever opens it maps its files, so that processes of a host share their pages.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

By = Literal["words", "meaning", "both"]
BATCH = 256
"""Texts that are read and embedded at a time."""
TRAINED = 1 << 16
"""Texts whose vectors a compressed index is trained on, at most."""
FUSED, DAMPING = 50, 60
"""Texts of each ranking that `both` fuses at least, and the constant of reciprocal rank fusion
(https://doi.org/10.1145/1571941.1572114)."""


class SearchProblem(ValueError):
    """An index that cannot be built, opened or asked so: what is wrong, and the fix."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}: {fix}")
        self.problem, self.fix = problem, fix


class Embedder(BaseModel):
    """The model that makes the vectors; what stands before a query and a text is its own where it is None."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    query_prompt: str | None = None
    text_prompt: str | None = None


class About(BaseModel):
    """What `index.json` says; `id` is new with each build."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    form: Literal[1] = 1
    id: str
    texts: int
    words: bool
    embedder: Embedder | None = None

    def way(self, by: By | None) -> By:
        """By what texts are found where `by` is asked for; None: by all that there is. Raises SearchProblem."""
        has: By = "both" if self.words and self.embedder else "words" if self.words else "meaning"
        if by is not None and has not in (by, "both"):
            raise SearchProblem(f"the index finds texts by {has} alone", f"ask by {has}, or build it anew")
        return by or has


class Found(NamedTuple):
    """A text that was found: its row, from 0 in the corpus's order, and how well it fits; more is better."""

    row: int
    score: float
    text: str


class Encoder:
    """Vectors of length one, float32[N, D], by `sentence-transformers`. Raises SearchProblem."""

    def __init__(self, embedder: Embedder, device: str = "cpu") -> None:
        if not all(map(find_spec, ("faiss", "sentence_transformers"))):
            raise SearchProblem("search by meaning needs packages", "pip install 'headrace-search[meaning]'")
        if not Path(embedder.path).is_dir():
            raise SearchProblem(
                f"there is no folder {embedder.path}", "name the folder of an embedding model"
            )
        from sentence_transformers import SentenceTransformer

        self._embedder = embedder
        try:
            self._model = SentenceTransformer(embedder.path, device=device, local_files_only=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise SearchProblem(
                f"{embedder.path} cannot be loaded ({error})",
                "name one for sentence-transformers",
            ) from error

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """Of texts of the corpus."""
        return self._vectors(self._model.encode_document, texts, self._embedder.text_prompt)

    def queries(self, queries: Sequence[str]) -> np.ndarray:
        """Of what is searched for."""
        return self._vectors(self._model.encode_query, queries, self._embedder.query_prompt)

    def _vectors(self, encode: Callable[..., Any], texts: Sequence[str], prompt: str | None) -> np.ndarray:
        found = encode(list(texts), prompt=prompt, normalize_embeddings=True, show_progress_bar=False)
        return np.ascontiguousarray(found, dtype=np.float32)


def read_texts(corpus: Path, key: str = "text") -> Iterator[str]:
    """The texts of a JSON lines file, one a line, each a text or an object with `key`. Raises SearchProblem by line."""
    try:
        with corpus.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                    yield row if isinstance(row, str) else str(row[key])
                except (ValueError, KeyError, TypeError) as error:
                    raise SearchProblem(
                        f"{corpus}:{number} is no JSON with a key {key!r}",
                        "name the key of the texts",
                    ) from error
    except OSError as error:
        raise SearchProblem(
            f"{corpus} cannot be read ({error.strerror})", "name a file of JSON lines"
        ) from error


def words_of(texts: Sequence[str]) -> Any:
    """BM25 over texts in memory."""
    import bm25s

    found = bm25s.BM25()
    found.index(bm25s.tokenize(list(texts), show_progress=False), show_progress=False)
    return found


def ranked_by_words(words: Any, total: int, query: str, count: int) -> list[tuple[int, float]]:
    """Rows with their scores, the best first; none where no word of the query is known."""
    import bm25s

    asked = bm25s.tokenize([query], show_progress=False)
    if not asked.vocab:
        return []
    rows, scores = words.retrieve(asked, k=min(count, total), show_progress=False, n_threads=1)
    pairs = zip(rows[0], scores[0], strict=True)
    return [(int(row), float(score)) for row, score in pairs if score > 0]


def build(
    corpus: Path,
    folder: Path,
    *,
    key: str = "text",
    words: bool = True,
    embedder: Embedder | None = None,
    kind: str = "Flat",
    device: str = "cpu",
    progress: Callable[[int], object] = lambda done: None,
) -> About:
    """Builds the index `folder` of a corpus, whole or not at all; `progress` hears how many texts are done.

    `kind` is a factory string of faiss: "Flat" is exact, "IVF4096,SQ8" a quarter of the memory and approximate. BM25
    holds the tokens of all texts in memory meanwhile. Raises SearchProblem.
    """
    if folder.exists():
        raise SearchProblem(f"{folder} is there already", "remove it, or name another folder")
    if not words and embedder is None:
        raise SearchProblem("there is nothing to find texts by", "keep words, or give a model")
    encoder = Encoder(embedder, device) if embedder is not None else None
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        total = _write_texts(read_texts(corpus, key), aside, progress)
        if not total:
            raise SearchProblem(f"{corpus} is empty", "write a text a line")
        stored = Texts(aside)
        if words:
            words_of([stored[row] for row in range(total)]).save(aside / "words", show_progress=False)
        if encoder is not None:
            _write_vectors(stored, encoder, kind, aside / "meaning.faiss", progress)
        about = About(id=uuid.uuid4().hex, texts=total, words=words, embedder=embedder)
        (aside / "index.json").write_text(about.model_dump_json(indent=2), encoding="utf-8")
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return about


def _write_texts(texts: Iterator[str], folder: Path, progress: Callable[[int], object]) -> int:
    ends = [0]
    with (folder / "texts.bin").open("wb") as file:
        for text in texts:
            ends.append(ends[-1] + file.write(text.encode("utf-8", "replace")))
            if len(ends) % BATCH == 0:
                progress(len(ends) - 1)
    np.save(folder / "ends.npy", np.array(ends, dtype=np.int64))
    return len(ends) - 1


def _write_vectors(
    texts: Texts, encoder: Encoder, kind: str, file: Path, progress: Callable[[int], object]
) -> None:
    import faiss

    batches = (encoder.texts(some) for some in _batches(texts))
    first = next(batches)
    try:
        index = faiss.index_factory(first.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise SearchProblem(f"{kind!r} is no index of faiss", "write Flat, or such as IVF4096,SQ8") from error
    if not index.is_trained:
        first = np.concatenate([first, *islice(batches, TRAINED // BATCH)])
        try:
            index.train(first)
        except RuntimeError as error:
            raise SearchProblem(
                f"{kind!r} cannot be trained on {len(first):,} texts", "write Flat"
            ) from error
    for vectors in chain([first], batches):
        index.add(vectors)
        progress(index.ntotal)
    faiss.write_index(index, str(file))


def _batches(texts: Texts) -> Iterator[list[str]]:
    for begin in range(0, len(texts), BATCH):
        yield [texts[row] for row in range(begin, min(begin + BATCH, len(texts)))]


class Texts(Sequence[str]):
    """The texts of an index, mapped from their file."""

    def __init__(self, folder: Path) -> None:
        self._ends = np.load(folder / "ends.npy", mmap_mode="r")
        self._bytes = np.memmap(folder / "texts.bin", mode="r") if self._ends[-1] else np.empty(0, np.uint8)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: Any) -> Any:
        return self._bytes[self._ends[row] : self._ends[row + 1]].tobytes().decode("utf-8")


class Index:
    """An open index. Raises SearchProblem for a folder that is none."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.about = folder, read_about(folder)
        self._texts = Texts(folder)

    def search(self, queries: Sequence[str], count: int, by: By | None = None) -> list[list[Found]]:
        """The texts that fit each query best, `count` at most; by all that the index has where `by` is None.

        Raises SearchProblem for what the index does not have.
        """
        way = self.about.way(by)
        rankings = self._rankings(queries, max(count, FUSED) if way == "both" else count, way)
        found = []
        for several in rankings:
            ranked = several[0] if len(several) == 1 else fused(several)
            found.append([Found(row, score, self._texts[row]) for row, score in ranked[:count]])
        return found

    def _rankings(self, queries: Sequence[str], count: int, by: By) -> list[list[list[tuple[int, float]]]]:
        """Of each query, one or two rankings."""
        found: list[list[list[tuple[int, float]]]] = [[] for _ in queries]
        if by != "meaning":
            for query, each in zip(queries, found, strict=True):
                each.append(ranked_by_words(self._words, len(self._texts), query, count))
        if by != "words":
            scores, rows = self._meaning.search(self.encoder.queries(queries), min(count, len(self._texts)))
            for each, own_rows, own_scores in zip(found, rows, scores, strict=True):
                pairs = zip(own_rows, own_scores, strict=True)
                each.append([(int(row), float(score)) for row, score in pairs if row >= 0])
        return found

    @cached_property
    def _words(self) -> Any:
        import bm25s

        return bm25s.BM25.load(self.folder / "words", mmap=True)

    @cached_property
    def encoder(self) -> Encoder:
        """The model of the index's vectors."""
        assert self.about.embedder is not None
        return Encoder(self.about.embedder)

    @cached_property
    def _meaning(self) -> Any:
        import faiss

        return faiss.read_index(str(self.folder / "meaning.faiss"), faiss.IO_FLAG_MMAP_IFC)


def fused(rankings: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """One ranking of several, by the sum of 1 / (60 + rank), ranks from 1."""
    scores: dict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, (row, _) in enumerate(ranking, 1):
            scores[row] += 1 / (DAMPING + rank)
    return sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))


def read_about(folder: Path) -> About:
    """What an index says of itself. Raises SearchProblem."""
    try:
        return About.model_validate_json((folder / "index.json").read_bytes())
    except OSError as error:
        raise SearchProblem(f"{folder} is no index", f"headrace search build CORPUS {folder}") from error
    except ValidationError as error:
        raise SearchProblem(f"{folder} has another form than this version reads", "build it anew") from error
