"""Parity where sizes do not divide: padded shards change neither the loss nor any gradient or update."""

import pytest
from matrix import sampled_rows
from parity_case import Case, assert_parity
from workers import FSDP2_TP2, FSDP4, TP2, size

VOCABULARY = 131  # divides by neither 2 nor 4


@pytest.mark.parametrize(("layout", "tied"), sampled_rows([(TP2, True), (FSDP4, False), (FSDP2_TP2, True)], 2))
def test_a_vocabulary_that_does_not_divide(world, checkpoint, layout, tied):
    overrides = {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "tie_word_embeddings": tied}
    case = Case("llama", layout, step=True, overrides=overrides)
    assert_parity(world(size(layout)), case, checkpoint("llama", **overrides))


def test_a_padding_token_in_an_uneven_vocabulary(world, checkpoint):
    overrides = {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "pad_token_id": VOCABULARY - 1}
    case = Case("llama", TP2, step=True, overrides=overrides)
    assert_parity(world(2), case, checkpoint("llama", **overrides))


def test_an_mlp_width_that_tp_does_not_divide(world, checkpoint):
    overrides = {"intermediate_size": 75, "num_hidden_layers": 1}
    assert_parity(world(2), Case("llama", TP2, step=True, overrides=overrides), checkpoint("llama", **overrides))


def test_rows_that_fsdp_does_not_divide(ranks, checkpoint):
    sizes = {"hidden_size": 54, "intermediate_size": 75, "head_dim": 6}
    overrides = {**sizes, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 1}
    assert_parity(ranks, Case("llama", FSDP4, step=True, overrides=overrides), checkpoint("llama", **overrides))


def test_parameters_smaller_than_the_axis(ranks, checkpoint):
    """q and k norms of 2 elements on 4 ranks: half of the shards are empty."""
    overrides = {"head_dim": 2, "num_hidden_layers": 1}
    assert_parity(ranks, Case("qwen3", FSDP4, step=True, overrides=overrides), checkpoint("qwen3", **overrides))


def test_parameters_smaller_than_fsdp_under_tp(ranks, checkpoint):
    sizes = {"hidden_size": 10, "intermediate_size": 6, "head_dim": 2}
    overrides = {**sizes, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    assert_parity(ranks, Case("qwen3", FSDP2_TP2, step=True, overrides=overrides), checkpoint("qwen3", **overrides))
