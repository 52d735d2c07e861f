"""A corpus, and a tiny embedding model with random weights, whose mean over tokens still tells words apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from search_parts import TEXTS


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return path


@pytest.fixture(scope="session")
def embedding_model(tmp_path_factory):
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    words = sorted({word for text in TEXTS for word in text.lower().strip(".").split()})
    vocab = {word: at for at, word in enumerate(["[PAD]", "[UNK]", *words])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    body = Transformer(str(folder / "bert"))
    made = SentenceTransformer(modules=[body, Pooling(32, pooling_mode="mean")], device="cpu")
    made.save(str(folder / "embeds"))
    return folder / "embeds"


@pytest.fixture(scope="session")
def index(corpus, embedding_model, tmp_path_factory):
    from headrace_search.index import Embedder, build

    folder = tmp_path_factory.mktemp("built") / "index"
    build(corpus, folder, embedder=Embedder(path=str(embedding_model)))
    return folder
