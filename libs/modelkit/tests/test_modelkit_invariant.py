"""Forms whose bits for a row follow from that row alone: products, attention, activations, the head; refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from headrace_modelkit.hidden import hidden_log_probs, vocabulary_totals
from headrace_modelkit.invariant import KEYS, OnlyInvariant, Varies, attention, make_invariant
from headrace_modelkit.loading import body_of
from headrace_modelkit.logprobs import Head
from headrace_modelkit.presets.families import write_family
from headrace_modelkit.products import COLUMNS, ROWS, fixed_products, row_products

FEW = (1, 2, 3, 5, ROWS, ROWS + 1, 40)
"""Numbers of rows; a plain product of 1, 2 or 3 of them adds up otherwise than that of 40."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(50, 33), (576, 192), (64, COLUMNS + 40)])
def test_a_row_of_a_product_has_its_bits_whatever_is_beside_it(dtype, inputs, outputs):
    weight, bias, rows = (
        torch.randn(*shape).to(dtype) for shape in ((outputs, inputs), (outputs,), (40, inputs))
    )
    whole = fixed_products(rows, weight, bias)
    torch.testing.assert_close(whole, F.linear(rows, weight, bias), atol=1e-3, rtol=2e-2)
    for count in FEW:
        assert torch.equal(fixed_products(rows[:count], weight, bias), whole[:count])
        assert torch.equal(fixed_products(rows[-count:], weight, bias), whole[-count:])
    found = fixed_products(rows, weight[:COLUMNS])
    assert torch.equal(found, fixed_products(rows, weight)[:, :COLUMNS]), "nor the columns behind a tile"


def test_a_plain_product_does_not_so_the_comparison_can_fail():
    weight, rows = torch.randn(192, 576), torch.randn(40, 576)
    assert any(not torch.equal(F.linear(rows[:n], weight), F.linear(rows, weight)[:n]) for n in FEW)


def test_products_and_attention_have_a_plain_gradient():
    given, weight, bias = torch.randn(2, 9, 24), torch.randn(40, 24), torch.randn(40)
    own = [each.clone().requires_grad_() for each in (given, weight, bias)]
    plain = [each.clone().requires_grad_() for each in (given, weight, bias)]
    row_products(*own).square().sum().backward()
    F.linear(*plain).square().sum().backward()
    for mine, other in zip(own, plain, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-3, rtol=1e-4)
    shapes = ((2, 6, 70, 16), (2, 3, 70, 16), (2, 3, 70, 16))
    own = [torch.randn(shape).requires_grad_() for shape in shapes]
    plain = [each.detach().clone().requires_grad_() for each in own]
    found = attention(torch.nn.Module(), *own, None)[0]
    expected = F.scaled_dot_product_attention(*plain, is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    by = torch.randn_like(found)
    for outcome in (found, expected):
        (outcome * by).sum().backward()
    for mine, other in zip(own, plain, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("heads", "groups"), [(9, 3), (2, 2)])
def test_a_decoded_token_attends_to_the_bits_of_its_place_in_a_prompt(heads, groups):
    length = KEYS + 9
    query, key, value = (torch.randn(2, each, length, 16) for each in (heads, groups, groups))
    whole = attention(torch.nn.Module(), query, key, value, None)[0]
    for at in range(length):
        for behind in (0, 1, KEYS):  # what other rows make visible: anything
            keys, values = (torch.randn(2, groups, at + 1 + behind, 16) for _ in range(2))
            keys[:, :, : at + 1], values[:, :, : at + 1] = key[:, :, : at + 1], value[:, :, : at + 1]
            mask = torch.zeros(2, 1, 1, at + 1 + behind)
            mask[..., at + 1 :] = float("-inf")
            found = attention(torch.nn.Module(), query[:, :, at : at + 1], keys, values, mask)[0]
            assert torch.equal(found[:, 0], whole[:, at]), (at, behind)
        alone = [each[1:, :, : at + 1] for each in (query, key, value)]
        assert torch.equal(attention(torch.nn.Module(), *alone, None)[0][0], whole[1, : at + 1])


@pytest.mark.parametrize("vocabulary", [32, COLUMNS + 40])
def test_a_trainers_tiles_give_the_log_probs_of_an_engines_rows(vocabulary):
    hidden, weight = torch.randn(21, 24), torch.randn(vocabulary, 24)
    head = Head(weight, None, 1.0, None, invariant=True)
    tokens = torch.randint(vocabulary, (21,))
    learned, _ = hidden_log_probs(head, hidden, tokens, 0.7, entropy=True)
    for row in range(21):
        scores = head.logits(hidden[row : row + 1]) / torch.tensor([0.7])[:, None]
        sampled = scores[0, tokens[row]] - vocabulary_totals(scores)[0]
        assert torch.equal(sampled, learned[row]), row


def test_a_model_computes_a_row_alike_and_one_with_products_of_its_own_is_refused(tmp_path):
    ids = torch.randint(3, 32, (3, 20))
    model = write_family(tmp_path / "phi3", "phi3")  # whose MLP is no multiple of a register wide
    make_invariant(model)
    with torch.inference_mode(), OnlyInvariant():
        whole = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state
        for row in range(3):
            for length in (1, 7, 20):
                given = ids[row : row + 1, :length]
                found = body_of(model)(input_ids=given, use_cache=False).last_hidden_state
                assert torch.equal(found[0], whole[row, :length])
    other = write_family(tmp_path / "gpt2", "gpt2")
    make_invariant(other)
    with torch.inference_mode(), OnlyInvariant(), pytest.raises(Varies, match="addmm outside a linear layer"):
        body_of(other)(input_ids=ids, use_cache=False)
    scaled = write_family(tmp_path / "llama", "llama")
    scaled.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="by the longest sequence of a batch"):
        make_invariant(scaled)
