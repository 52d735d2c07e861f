"""An index finds texts by words and by meaning, is built whole or not at all, and says what is wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
from headrace_search import index as index_module
from headrace_search.index import Embedder, Index, SearchProblem, build, fused
from search_parts import TEXTS


def rows(found):
    return [each.row for each in found]


def test_texts_are_found_by_words_and_come_as_they_were(index):
    ours = Index(index)
    (found,) = ours.search(["the Danube at Ulm"], 2, "words")
    assert rows(found) == [0, 2] and [each.text for each in found] == [TEXTS[0], TEXTS[2]]
    assert found[0].score > found[1].score > 0
    assert ours.search(["zebra", ""], 2, "words") == [[], []]


def test_texts_are_found_by_the_vectors_of_the_model(index, embedding_model):
    """The ranking is that of the model itself, of whole texts: not of words that they share."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(embedding_model), device="cpu")
    queries = ["dogs at night", "a minster"]
    near = model.encode(queries, normalize_embeddings=True) @ model.encode(TEXTS, normalize_embeddings=True).T
    found = Index(index).search(queries, 3, "meaning")
    assert [rows(each) for each in found] == [list(np.argsort(-each)[:3]) for each in near]
    assert found[0][0].score == pytest.approx(near[0].max(), abs=1e-5)
    assert rows(found[0])[0] == 4 and rows(found[1])[0] == 2


def test_both_ways_are_fused_by_rank():
    best = fused([[(7, 9.0), (1, 1.0)], [(1, 0.2), (3, 0.1)]])
    assert [row for row, _ in best] == [1, 7, 3] and best[0][1] == pytest.approx(1 / 62 + 1 / 61)


def test_more_texts_are_asked_for_than_there_are(index):
    (found,) = Index(index).search(["flows"], 50)
    assert sorted(rows(found)) == [0, 1, 2, 3, 4]


def test_prompts_stand_before_queries_and_texts(corpus, embedding_model, tmp_path):
    plain, prompted = tmp_path / "plain", tmp_path / "prompted"
    build(corpus, plain, words=False, embedder=Embedder(path=str(embedding_model)))
    given = Embedder(path=str(embedding_model), query_prompt="cats ", text_prompt="")
    build(corpus, prompted, words=False, embedder=given)
    (found,) = Index(prompted).search(["flows through"], 1)
    (same,) = Index(plain).search(["cats flows through"], 1)
    (other,) = Index(plain).search(["flows through"], 1)
    assert found[0].row == same[0].row == 1 and found[0].score == pytest.approx(same[0].score)
    assert other[0].row != 1


def test_a_corpus_of_many_batches_is_built_in_order(tmp_path, embedding_model):
    corpus = tmp_path / "many.jsonl"
    texts = [f"{TEXTS[row % 5]} {row} ü" for row in range(600)]
    corpus.write_text("﻿" + "\n\n".join(map(json.dumps, texts)), encoding="utf-8")
    done = []
    about = build(
        corpus,
        tmp_path / "many",
        words=False,
        embedder=Embedder(path=str(embedding_model)),
        progress=done.append,
    )
    assert (about.texts == 600 and done == sorted(done)) or done[-1] == 600
    found = Index(tmp_path / "many").search([texts[599]], 600)[0]
    assert sorted(rows(found)) == list(range(600))
    assert all(each.text == texts[each.row] for each in found)


def test_a_build_that_ends_early_leaves_no_index(corpus, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_module.np, "save", full)
    with pytest.raises(OSError, match="No space"):
        build(corpus, tmp_path / "index")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"corpus": "none.jsonl"}, r"none.jsonl cannot be read \(No such file"),
        ({"corpus": "empty.jsonl"}, "empty.jsonl is empty"),
        ({"corpus": "bad.jsonl"}, r"bad.jsonl:2 is no JSON with a key 'text'"),
        ({"words": False}, "nothing to find texts by"),
        ({"embedder": Embedder(path="nowhere")}, "there is no folder nowhere"),
        ({"embedder": Embedder(path=".")}, r"\. cannot be loaded"),
        ({"folder": "."}, "is there already"),
    ],
)
def test_what_is_wrong_is_named(corpus, tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('"one"\n{"body": 1}')
    corpus = tmp_path / given.pop("corpus") if "corpus" in given else corpus
    with pytest.raises(SearchProblem, match=words):
        build(corpus, tmp_path / given.pop("folder", "index"), **given)


def test_an_index_says_what_it_cannot_do(corpus, embedding_model, tmp_path):
    build(corpus, tmp_path / "words")
    with pytest.raises(SearchProblem, match="by words alone: ask by words, or build it anew"):
        Index(tmp_path / "words").search(["x"], 1, "meaning")
    with pytest.raises(SearchProblem, match="'Float' is no index of faiss"):
        build(corpus, tmp_path / "kind", kind="Float", embedder=Embedder(path=str(embedding_model)))
    with pytest.raises(SearchProblem, match="cannot be trained on 5 texts"):
        build(corpus, tmp_path / "kind", kind="IVF64,Flat", embedder=Embedder(path=str(embedding_model)))
    with pytest.raises(SearchProblem, match="is no index"):
        Index(tmp_path)
