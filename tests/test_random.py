"""Dropout by seed: its mask is a function of seed, operator and index."""

import pytest
import torch

from ndcompile.operators.random_ops import attention_with_dropout, dropout, keep_mask, stream_seed

ONES = torch.ones(64, 64)


def seed(number):
    return torch.tensor(number)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_a_share_of_p_is_dropped_and_the_mean_stays(p):
    dropped = dropout(torch.ones(400, 400), p, seed(3), 7)
    assert (dropped == 0).float().mean().item() == pytest.approx(p, abs=0.005)
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.02)


def test_the_same_seed_and_operator_draw_the_same_mask():
    assert torch.equal(keep_mask(ONES, 0.5, seed(3), 7), keep_mask(ONES, 0.5, seed(3), 7))


def test_seeds_and_operators_that_follow_each_other_draw_independent_masks():
    masks = [keep_mask(ONES, 0.5, seed(s), salt) for s in (3, 4, 5) for salt in (7, 8)]
    for number, mask in enumerate(masks):
        for other in masks[:number]:
            assert (mask == other).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_neighbours_are_independent():
    mask = keep_mask(torch.ones(1 << 16), 0.5, seed(3), 7).float()
    for distance in (1, 2, 64):
        assert (mask[:-distance] == mask[distance:]).float().mean().item() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_the_ends(p):
    assert torch.equal(dropout(ONES, p, seed(3), 7), ONES if p == 0 else torch.zeros(64, 64))


def test_steps_and_ranks_have_different_seeds_below_two_to_the_32():
    places = ((0,), (1,), (0, 0), (0, 1))
    seeds = {stream_seed(base, step, *at) for base in (0, 2**40) for step in range(20) for at in places}
    assert len(seeds) == 2 * 20 * 4
    assert all(0 <= number < 2**32 for number in seeds)


@pytest.mark.parametrize("case", ["plain", "causal", "mask", "added mask", "grouped"])
def test_attention_with_no_dropout_is_scaled_dot_product_attention(case):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 6, 8, generator=generator) for heads in (4, 4, 4))
    if case == "grouped":
        key, value = key[:, :2], value[:, :2]
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    if case == "added mask":
        mask = torch.zeros(2, 1, 6, 6).masked_fill(~mask, -1e9)
    mask = mask if "mask" in case else None
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=case == "causal", enable_gqa=case == "grouped"
    )
    actual = attention_with_dropout(query, key, value, mask, 0.0, case == "causal", None, seed(3), 7)
    torch.testing.assert_close(actual, expected)
