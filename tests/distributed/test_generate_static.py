"""model.generate() with a static cache: the tokens of the single-process model, in two programs."""

import models
import pytest
import torch
import workers
from matrix import sampled_rows
from transformers.cache_utils import StaticCache
from workers import FSDP2_TP2, TP2, size

import ndcompile
from ndcompile.lowering.cuda_graphs import fixed_inputs
from ndcompile.model_calls import compiled_model

TWO = {"num_hidden_layers": 2}
FSDP2 = (("fsdp", 2),)
ARGUMENTS = {
    "max_new_tokens": 12,
    "do_sample": False,
    "pad_token_id": 0,
    "use_cache": True,
    "cache_implementation": "static",
}
CASES = [
    # model, layout, overrides, options, by data rank the programs for a prompt and for a token more: gemma2's window is
    # full on the way, or after a prompt of 8 tokens.
    ("llama", TP2, {}, {"backend": "aot_eager"}, [[1, 1]]),
    ("gemma2", TP2, {"sliding_window": 8}, {}, [[1, 2]]),
    ("qwen3", FSDP2, {}, {}, [[1, 1], [1, 1]]),
    ("llama", FSDP2_TP2, {}, {}, [[1, 1], [1, 1]]),
    ("qwen3", TP2, {}, {}, [[1, 1]]),
    ("gemma2", FSDP2_TP2, {"sliding_window": 8}, {}, [[1, 2], [1, 1]]),
    ("deepseek_v2", TP2, {}, {}, [[1, 1]]),
]


def _prompts(data_rank):
    """Data rank r has prompts of another length, the first of them padded on the left."""
    ids = models.token_ids(2, 6 + 2 * data_rank, seed=data_rank)
    mask = torch.ones_like(ids)
    mask[0, : 1 + data_rank] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _generate(name, layout, overrides, checkpoint, options):
    model = workers.compiled(name, layout, checkpoint, overrides, **options).eval()
    rank = ndcompile.data_rank(model)
    tokens = [model.generate(**_prompts(rank), **ARGUMENTS) for _ in range(2)]
    return rank, tokens, [len(signature.programs) for signature in compiled_model(model).signatures.values()]


@pytest.mark.parametrize(
    ("model", "layout", "overrides", "options", "programs"), sampled_rows(CASES, 1), ids=lambda v: None
)
def test_greedy_tokens_are_those_of_one_process(world, checkpoint, model, layout, overrides, options, programs):
    overrides = TWO | overrides
    plain = models.build(model, **overrides).eval()
    for rank, tokens, found in world(size(layout))(
        _generate, model, layout, overrides, checkpoint(model, **overrides), options
    ):
        expected = plain.generate(**_prompts(rank), **ARGUMENTS)
        assert all(torch.equal(other, expected) for other in tokens)
        assert found == programs[rank]


def _by_hand(checkpoint):
    """A prompt, then token by token, of a cache without tensors; and the heads that it got."""
    model = workers.compiled("llama", TP2, checkpoint, TWO).eval()
    ids, cache = models.token_ids(2, 9), StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        logits = [model(input_ids=part, cache=cache).logits for part in ids.split([6, 1, 1, 1], 1)]
    return workers.error(torch.cat(logits, 1), whole), cache.layers[0].keys.shape[1]


def test_a_rank_holds_its_own_heads(world, checkpoint):
    heads = models.config("llama").num_key_value_heads
    assert [(error < 1e-5, own) for error, own in world(2)(_by_hand, checkpoint("llama", **TWO))] == [
        (True, heads // 2)
    ] * 2


def _reasons(checkpoint, exchange):
    """Whether the programs of a model with experts can be recorded on a GPU."""
    options = {"distributed_config": {"tp_size": 2, "ep_size": 2, "ep_implementation": exchange}}
    model = workers.compiled("qwen3_moe", TP2, checkpoint, TWO, **options).eval()
    model.generate(models.token_ids(2, 6), **ARGUMENTS)
    programs = [p for signature in compiled_model(model).signatures.values() for p in signature.programs]
    with torch.no_grad():
        return [fixed_inputs(program.captured, torch.device("cuda"), "") is not None for program in programs]


@pytest.mark.parametrize(("exchange", "recorded"), sampled_rows([("all_to_all", False), ("all_reduce", True)], 1))
def test_experts_in_fixed_shapes_can_be_recorded(world, checkpoint, exchange, recorded):
    for found in world(2)(_reasons, checkpoint("qwen3_moe", **TWO), exchange):
        assert found == [recorded] * 2
