"""Log-probs, entropies and the weight layout."""

from __future__ import annotations

import pytest
import torch
from headrace_modelkit import hidden as hidden_module
from headrace_modelkit import logprobs, products
from headrace_modelkit.hidden import hidden_log_probs
from headrace_modelkit.logprobs import Head, token_entropy, token_log_probs
from headrace_modelkit.presets.tiny import tiny_model
from headrace_modelkit.products import PackedWeight
from headrace_modelkit.weights import copy_out, load_weights, share_weights, state_tensors, weight_layout

B, T, V = 3, 5, 11


@pytest.fixture(
    params=[(1 << 24, 1, 99), (2 * V, 1, 99), (2 * V, 22, 4), (16, 2, 4)],
    ids=["whole", "in chunks of two rows", "in tiles of one row", "in tiles of two rows"],
)
def chunk_elements(request, monkeypatch):
    elements, tiles, columns = request.param
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
    monkeypatch.setattr(hidden_module, "TILES_IN_CHUNK", tiles)
    monkeypatch.setattr(hidden_module, "TILE_COLUMNS", columns)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_log_probs_and_entropy_equal_the_definition(chunk_elements, temperature):
    logits = torch.randn(B, T, V, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tokens = torch.arange(B * T).reshape(B, T) % V
    full = (logits / (temperature or 1.0)).log_softmax(-1)
    expected = full.gather(-1, tokens[..., None])[..., 0]
    found = token_log_probs(logits, tokens, temperature)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(token_entropy(logits, temperature), -(full.exp() * full).sum(-1))
    weights = torch.arange(B * T).reshape(B, T).float()
    (mine,) = torch.autograd.grad((found * weights).sum(), logits, retain_graph=True)
    (theirs,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(mine, theirs)


def test_bf16_logits_are_widened_before_the_softmax():
    logits = (torch.randn(1, T, V) * 5).bfloat16()
    tokens = torch.zeros(1, T, dtype=torch.long)
    found = token_log_probs(logits, tokens, 1.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, logits.float().log_softmax(-1)[..., 0])


def test_the_head_rounds_no_logit_to_bf16(chunk_elements):
    """Logits of a bf16 head are off by up to 2^-9 of themselves; the fp32 head is exact."""
    model = tiny_model().to(torch.bfloat16)
    head = Head.of(model)
    hidden = (torch.randn(7, 64) * 4).bfloat16()
    exact = hidden.double() @ head.weight_VD.double().T
    for each in (head, head.widened()):
        torch.testing.assert_close(each.logits(hidden).double(), exact, rtol=1e-5, atol=1e-5)
    tokens = torch.arange(7)
    found, entropy = hidden_log_probs(head, hidden, tokens, 0.7, entropy=True)
    expected = (exact / 0.7).log_softmax(-1)
    torch.testing.assert_close(
        found.double(), expected.gather(-1, tokens[:, None])[:, 0], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), rtol=1e-4, atol=1e-4)
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16", "the setting is put back"


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """bf16 factors are multiplied as they are; `wide_product` has the same numbers on a CPU."""
    monkeypatch.setattr(
        logprobs, "narrow_products", lambda *factors: all(each.dtype == torch.bfloat16 for each in factors)
    )


def _bf16_head(words: int = 512, width: int = 64, rows: int = 96) -> tuple[Head, torch.Tensor, torch.Tensor]:
    """A head, hidden states and words as spread as a trained model's."""
    generator = torch.Generator().manual_seed(3)
    weight = (0.4 * torch.randn(words, width, generator=generator)).bfloat16().requires_grad_()
    hidden = torch.randn(rows, width, generator=generator).bfloat16().requires_grad_()
    bias = torch.randn(words, generator=generator).bfloat16().requires_grad_()
    return Head(weight, bias, 1.0, None), hidden, torch.arange(rows) * 5 % words


def test_products_of_bf16_give_fp32_log_probs_and_a_gradient_off_by_rounding_alone(
    as_on_a_gpu, chunk_elements, monkeypatch
):
    """The bounds of docs/algorithms.md: log-probs as in fp32, the head's gradient within 0.4%."""
    head, hidden, tokens = _bf16_head()
    upstream = torch.linspace(-1.0, 1.0, len(tokens))
    wide = [each.detach().double().requires_grad_() for each in (hidden, head.weight_VD, head.bias_V)]
    full = ((wide[0] @ wide[1].T + wide[2]) / 0.7).log_softmax(-1)
    exact = full.gather(-1, tokens[:, None])[:, 0], -(full.exp() * full).sum(-1)
    expected = torch.autograd.grad((exact[0] * upstream + 0.1 * exact[1]).sum(), wide)
    found = hidden_log_probs(head, hidden, tokens, 0.7, entropy=True)
    for own, other in zip(found, exact, strict=True):
        assert float((own.detach() - other).abs().mean()) < 1e-5
    given = torch.autograd.grad(
        (found[0] * upstream + 0.1 * found[1]).sum(), (hidden, head.weight_VD, head.bias_V)
    )
    assert given[1].dtype == torch.float32
    for own, other, bound in zip(given, expected, (4e-3, 4e-3, 1e-5), strict=True):
        assert float((own.double() - other).norm() / other.norm()) < bound
    rounded = (hidden @ head.weight_VD.T + head.bias_V).float() / 0.7  # what a bf16 head would give
    off = rounded.log_softmax(-1).gather(-1, tokens[:, None])[:, 0] - exact[0]
    assert float(off.abs().mean()) > 1e-3


def test_a_head_that_products_take_in_bf16_is_not_widened(as_on_a_gpu):
    head, hidden, _ = _bf16_head()
    assert head.widened() is head
    assert head.logits(hidden).dtype == torch.float32


def test_chunks_of_a_gpu_are_larger():
    sizes = [logprobs.chunk_elements(torch.device(name)) for name in ("cpu", "cuda:0")]
    assert sizes == [logprobs.CHUNK_ELEMENTS, logprobs.GPU_CHUNK_ELEMENTS] and sizes[1] == 4 * sizes[0]


def test_hidden_log_probs_are_differentiable_in_hidden_states_and_head(chunk_elements):
    model = tiny_model()
    head, tokens = Head.of(model), torch.arange(7)
    hidden = torch.randn(7, 64, requires_grad=True)
    expected = (hidden @ head.weight_VD.T / 0.7).log_softmax(-1).gather(-1, tokens[:, None])[:, 0].sum()
    found, none = hidden_log_probs(head, hidden, tokens, 0.7)
    assert none is None
    inputs = [hidden, model.lm_head.weight]
    for mine, theirs in zip(
        torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_several_words_of_a_row_have_the_log_probs_and_gradients_of_whole_logits(chunk_elements):
    generator = torch.Generator().manual_seed(0)
    weight, bias, hidden = (torch.randn(*s, generator=generator) for s in ((V, 4), (V,), (7, 4)))
    tokens, upstream = torch.arange(21).reshape(7, 3) % V, torch.randn(7, 3, generator=generator)
    wide = [tensor.double().requires_grad_() for tensor in (hidden, weight, bias)]
    expected = ((wide[0] @ wide[1].T + wide[2]) / 0.7).log_softmax(-1).gather(-1, tokens)
    (expected * upstream).sum().backward()
    mine = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    found, _ = hidden_log_probs(Head(mine[1], mine[2], 1.0, None), mine[0], tokens, 0.7)
    (found * upstream).sum().backward()
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
    for one, other in zip(mine, wide, strict=True):
        torch.testing.assert_close(one.grad, other.grad.float(), rtol=1e-4, atol=1e-5)
    alone, _ = hidden_log_probs(Head(mine[1], mine[2], 1.0, None), mine[0], tokens[:, 0], 0.7)
    assert alone.equal(found[:, 0]), "to the bit, whatever else is asked for"


@pytest.mark.parametrize("used", ["both", "entropy", "log-probs"])
@pytest.mark.parametrize("temperature", [0.7, torch.linspace(0.3, 2.1, 7)], ids=["one", "by row"])
def test_the_entropy_is_differentiable_in_hidden_states_and_head(chunk_elements, used, temperature):
    generator = torch.Generator().manual_seed(0)
    weight, bias, hidden = (
        torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((V, 4), (V,), (7, 4))
    )
    upstream, tokens = torch.randn(2, 7, generator=generator), torch.arange(7)
    upstream *= torch.tensor([[used != "entropy"], [used != "log-probs"]])
    wide = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    divisor = temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature
    full = (5.0 * torch.tanh(2.0 * (wide[0] @ wide[1].T + wide[2]) / 5.0) / divisor).log_softmax(-1)
    expected = (full.gather(-1, tokens[:, None])[:, 0], -(full.exp() * full).sum(-1))
    (expected[0] * upstream[0] + expected[1] * upstream[1]).sum().backward()
    mine = [tensor.float().requires_grad_() for tensor in (hidden, weight, bias)]
    found = hidden_log_probs(Head(mine[1], mine[2], 2.0, 5.0), mine[0], tokens, temperature, entropy=True)
    terms = [found[index] * upstream[index] for index in (0, 1) if upstream[index].any()]
    torch.stack(terms).sum().backward()
    torch.testing.assert_close(torch.stack(found), torch.stack(expected).float(), rtol=1e-5, atol=1e-5)
    for one, other in zip(mine, wide, strict=True):
        torch.testing.assert_close(one.grad, other.grad.float(), rtol=1e-4, atol=1e-5)


def test_a_word_that_the_bias_forbids_has_no_part_in_the_entropy(chunk_elements):
    weight, bias, hidden = torch.randn(V, 4), torch.zeros(V), torch.randn(7, 4, requires_grad=True)
    bias[5:] = -torch.inf
    _, found = hidden_log_probs(
        Head(weight, bias, 1.0, None), hidden, torch.arange(5).repeat(2)[:7], 1.0, entropy=True
    )
    short = (hidden.detach() @ weight[:5].T).requires_grad_()
    expected = -(short.log_softmax(-1).exp() * short.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(found, expected)
    (mine,) = torch.autograd.grad(found.sum(), hidden)
    (theirs,) = torch.autograd.grad(expected.sum(), short)
    torch.testing.assert_close(mine, theirs @ weight[:5], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_the_layout_round_trips_with_tied_weights_once(tied):
    model, other = tiny_model(1, tie_word_embeddings=tied), tiny_model(2, tie_word_embeddings=tied)
    layout = weight_layout(model, torch.float32)
    names = [name for name, _, _ in layout]
    assert names[0] == "model.embed_tokens.weight" and ("lm_head.weight" in names) is not tied
    assert names == [name for name, _, _ in weight_layout(other, torch.bfloat16)]
    bodies = {}
    for name, dtype, shape in layout:
        body = bytearray(dtype.itemsize * torch.Size(shape).numel())
        copy_out(model, name, memoryview(body), dtype)
        bodies[name] = torch.frombuffer(body, dtype=dtype).view(shape)
    load_weights(other, bodies)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, other(ids).logits)


def test_the_layout_casts_parameters():
    model = tiny_model()
    body = bytearray(2 * 64)
    copy_out(model, "model.norm.weight", memoryview(body), torch.bfloat16)
    assert torch.equal(torch.frombuffer(body, dtype=torch.bfloat16), model.model.norm.weight.bfloat16())
    assert {dtype for _, dtype, _ in weight_layout(model, torch.bfloat16)} == {torch.bfloat16}


def test_weights_of_another_model_are_refused_before_anything_is_written():
    model = tiny_model(1)
    before = {name: tensor.clone() for name, tensor in state_tensors(model)}
    good = dict(state_tensors(tiny_model(2)))
    missing = {name: tensor for name, tensor in good.items() if name != "model.norm.weight"}
    bad_shape = {**good, "model.norm.weight": torch.zeros(3)}
    for tensors, word in (
        (missing, "missing"),
        ({**good, "extra": torch.zeros(1)}, "unknown"),
        (bad_shape, "shape"),
    ):
        with pytest.raises(ValueError, match=word):
            load_weights(model, tensors)
    for name, tensor in state_tensors(model):
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_head_gives_the_logits_of_the_widened_one_in_fp32(dtype, monkeypatch):
    monkeypatch.setattr(products, "FEWEST_PACKED", 1)
    packed = PackedWeight()
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    for seed in range(2):  # the second version takes the place of the first
        head = Head.of(tiny_model(seed).to(dtype))
        with torch.inference_mode():
            found = head.packed_into(packed).logits(hidden)
            assert found.dtype == torch.float32
            assert torch.allclose(found, head.widened().logits(hidden), atol=1e-6, rtol=1e-5)


def test_shared_weights_are_used_where_they_are_unless_they_do_not_fit():
    source, model = tiny_model(1), tiny_model(2)
    given = {name: tensor.detach().clone() for name, tensor in state_tensors(source)}
    names = list(given)
    wide, odd = names[1], names[2]
    given[wide] = given[wide].double()
    odd_bytes = torch.empty(given[odd].numel() * 4 + 4, dtype=torch.uint8)
    moved = odd_bytes[4:].view(torch.float32).view(given[odd].shape)
    given[odd] = moved.copy_(given[odd])
    share_weights(model, given)
    for name, tensor in state_tensors(model):
        assert tensor.dtype == torch.float32
        assert (tensor.data_ptr() == given[name].data_ptr()) == (name not in (wide, odd)), name
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, source(tokens).logits)


def test_weights_of_another_model_are_not_shared():
    model = tiny_model()
    before = {name: tensor.data_ptr() for name, tensor in state_tensors(model)}
    given = {name: tensor.detach().clone() for name, tensor in state_tensors(model)}
    name = next(iter(given))
    given[name] = given[name][:-1]
    with pytest.raises(ValueError, match="has shape"):
        share_weights(model, given)
    assert before == {name: tensor.data_ptr() for name, tensor in state_tensors(model)}


@pytest.mark.parametrize("tied_elsewhere", [False, True])
@pytest.mark.parametrize("chunks", [1, 38, 128])
def test_the_gradient_of_a_bf16_head_adds_up_in_fp32(monkeypatch, chunks, tied_elsewhere):
    rows, vocabulary = 128 * 4, 97
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", -(-rows // chunks) * vocabulary)
    monkeypatch.setattr(hidden_module, "TILES_IN_CHUNK", 1)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, 32, generator=generator).bfloat16().requires_grad_()
    hidden = torch.randn(rows, 32, generator=generator).bfloat16().requires_grad_()
    tokens = torch.randint(0, vocabulary, (rows,), generator=generator)
    upstream = torch.randn(rows, generator=generator)
    wide = [tensor.detach().double().requires_grad_() for tensor in (weight, hidden)]
    scores = (10.0 * torch.tanh(2.0 * wide[1] @ wide[0].T / 10.0) / 0.7).log_softmax(-1)
    (scores.gather(-1, tokens[:, None])[:, 0] * upstream).sum().backward()
    for _ in range(2):  # two micro-batches
        found, _ = hidden_log_probs(Head(weight, None, 2.0, 10.0), hidden, tokens, 0.7)
        loss = (found * upstream).sum()
        (loss + (weight[tokens[:1]].sum() if tied_elsewhere else 0.0)).backward()
    expected = 2 * wide[0].grad
    if tied_elsewhere:
        expected[tokens[0]] += 2
    assert float((weight.grad - expected).norm() / expected.norm()) < 1e-4
    assert float((hidden.grad.double() - 2 * wide[1].grad).norm() / wide[1].grad.norm()) < 1e-2


def test_the_gradient_of_a_heads_bias_equals_the_definition(chunk_elements):
    generator = torch.Generator().manual_seed(0)
    weight, bias, hidden = (
        torch.randn(*s, generator=generator).requires_grad_() for s in ((V, 4), (V,), (7, 4))
    )
    tokens = torch.arange(7)
    expected = (hidden @ weight.T + bias).log_softmax(-1).gather(-1, tokens[:, None]).sum()
    found, _ = hidden_log_probs(Head(weight, bias, 1.0, None), hidden, tokens, 1.0)
    inputs = [hidden, weight, bias]
    for mine, theirs in zip(
        torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_entropy_that_no_loss_uses_changes_no_bit_of_the_gradient(chunk_elements):
    weight, hidden = torch.randn(V, 4).requires_grad_(), torch.randn(7, 4).requires_grad_()
    gradients = []
    for entropy in (False, True):
        found, _ = hidden_log_probs(
            Head(weight, None, 1.0, None), hidden, torch.arange(7), 1.0, entropy=entropy
        )
        gradients.append(torch.autograd.grad(found.sum(), [hidden, weight]))
    assert all(one.equal(other) for one, other in zip(*gradients, strict=True))


def test_the_gradient_at_bf16_hidden_states_is_a_sum_of_bf16_products(monkeypatch):
    """A tile's product is as exact as those of other layers, and the tiles add up in fp32."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 256)
    monkeypatch.setattr(hidden_module, "TILES_IN_CHUNK", 1)
    monkeypatch.setattr(hidden_module, "TILE_COLUMNS", 32)
    generator = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randn(*s, generator=generator).bfloat16() for s in ((64, 16), (8, 16)))
    hidden.requires_grad_()
    tokens = torch.randint(0, 64, (8,), generator=generator)
    found, _ = hidden_log_probs(Head(weight, None, 1.0, None), hidden, tokens, 1.0)
    found.sum().backward()
    logits = hidden.detach().float() @ weight.float().T
    at_logits = (torch.nn.functional.one_hot(tokens, 64) - logits.softmax(-1)).bfloat16()
    tiles = [(at_logits[:, part] @ weight[part]).float() for part in (slice(0, 32), slice(32, 64))]
    expected = (tiles[0] + tiles[1]).bfloat16()
    assert (hidden.grad == expected).float().mean() > 0.9  # softmax over tiles rounds now and then otherwise
