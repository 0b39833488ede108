"""model.generate() of a compiled model: the tokens of the single-process model, the same on all ranks of a tp group."""

import models
import pytest
import torch
import torch.distributed as dist
import workers
from matrix import sampled_rows
from transformers.cache_utils import DynamicCache
from workers import FSDP2_TP2, TP2, size

import ndcompile
from ndcompile.model_calls import compiled_model

TWO = {"num_hidden_layers": 2}
EP2 = (("fsdp", 2),)
CASES = [
    # model, layout, overrides, options: gemma2 has layers with a sliding window, shorter here than what is generated
    ("llama", FSDP2_TP2, {}, {}),
    ("gemma2", TP2, {"sliding_window": 8}, {}),
    ("qwen3_moe", EP2, {}, {"distributed_config": {"fsdp_size": 2, "ep_size": 2}}),
    ("deepseek_v2", TP2, {}, {}),
]


def _prompts(data_rank, rows=2):
    """Data rank r has prompts of another length, the first of them padded on the left."""
    ids = models.token_ids(rows, 6 + 2 * data_rank, seed=data_rank)
    mask = torch.ones_like(ids)
    mask[0, : 1 + data_rank] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _generate(name, layout, overrides, checkpoint, options, arguments, seed=None):
    model = workers.compiled(name, layout, checkpoint, overrides, **options).eval()
    if seed is not None:
        torch.manual_seed(seed + dist.get_rank())
    rank = ndcompile.data_rank(model)
    tokens = model.generate(**_prompts(rank), pad_token_id=0, use_cache=True, **arguments)
    programs = [len(signature.programs) for signature in compiled_model(model).signatures.values()]
    return rank, tokens, programs


def _expected(name, overrides, data_rank, arguments, seed=None):
    model = models.build(name, **overrides).eval()
    if seed is not None:
        torch.manual_seed(seed)
    return model.generate(**_prompts(data_rank), pad_token_id=0, use_cache=True, **arguments)


@pytest.mark.parametrize(
    ("model", "layout", "overrides", "options"), sampled_rows(CASES, 0, 2), ids=lambda v: v if v is str else None
)
def test_greedy_tokens_are_those_of_one_process(world, checkpoint, model, layout, overrides, options):
    overrides, arguments = TWO | overrides, {"max_new_tokens": 12, "do_sample": False}
    results = world(size(layout))(
        _generate, model, layout, overrides, checkpoint(model, **overrides), options, arguments
    )
    for rank, tokens, programs in results:
        assert torch.equal(tokens, _expected(model, overrides, rank, arguments))
        assert programs == [1, 3 if model == "gemma2" else 1]  # the prompt; one token more, whatever the length


def test_sampling_with_different_seeds_gives_a_tp_group_the_tokens_of_its_first_rank(world, checkpoint):
    arguments = {"max_new_tokens": 8, "do_sample": True, "top_k": 20}
    results = world(2)(_generate, "llama", TP2, TWO, checkpoint("llama", **TWO), {}, arguments, 3)
    for _, tokens, _ in results:
        assert torch.equal(tokens, _expected("llama", TWO, 0, arguments, seed=3))


@pytest.mark.parametrize(
    ("model", "sizes"), [("llama", {"fsdp_size": 2}), ("qwen3_moe", {"fsdp_size": 2, "ep_size": 2})]
)
def test_sampling_gives_data_ranks_the_tokens_of_one_process(world, checkpoint, model, sizes):
    """Each samples for its own prompt, from the generator of its own process."""
    options = {"distributed_config": sizes}
    arguments = {"max_new_tokens": 6, "do_sample": True, "top_k": 20}
    for rank, tokens, _ in world(2)(_generate, model, EP2, TWO, checkpoint(model, **TWO), options, arguments, 3):
        assert torch.equal(tokens, _expected(model, TWO, rank, arguments, seed=3 + rank))


def test_beam_search(world, checkpoint):
    arguments = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    for rank, tokens, _ in world(2)(_generate, "llama", TP2, TWO, checkpoint("llama", **TWO), {}, arguments):
        assert torch.equal(tokens, _expected("llama", TWO, rank, arguments))


def test_a_data_rank_that_finishes_early_waits_for_the_others(world, checkpoint):
    """The token that rank 0 chooses third ends its sequences; rank 1 goes on."""
    free = {"max_new_tokens": 10, "do_sample": False}
    end = _expected("llama", TWO, 0, free)[:, -8].tolist()
    arguments = free | {"eos_token_id": end}
    results = world(2)(_generate, "llama", (("fsdp", 2),), TWO, checkpoint("llama", **TWO), {}, arguments)
    lengths = []
    for rank, tokens, _ in results:
        assert torch.equal(tokens, _expected("llama", TWO, rank, arguments))
        lengths.append(tokens.shape[1] - (6 + 2 * rank))
    assert lengths[0] < lengths[1]


def _steps(layout, checkpoint):
    """A cache filled by hand: a prompt, then a token, against the logits of the whole."""
    model = workers.compiled("llama", layout, checkpoint, TWO).eval()
    ids, cache = models.token_ids(2, 9), DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        first = model(input_ids=ids[:, :5], cache=cache)
        second = model(input_ids=ids[:, 5:8], cache=first.cache)
        third = model(input_ids=ids[:, 8:], past_key_values=second.cache, use_cache=True)
    assert third.cache is cache
    assert cache.get_seq_length() == 9
    return workers.error(torch.cat([first.logits, second.logits, third.logits], 1), whole)


def test_logits_with_a_cache_are_those_without(world, checkpoint):
    assert max(world(2)(_steps, TP2, checkpoint("llama", **TWO))) < 1e-5


def _other_prompts():
    model = ndcompile.compile(models.build("llama", **TWO), workers.mesh(TP2), backend="eager").eval()
    model.generate(models.token_ids(2, 6, seed=dist.get_rank()), max_new_tokens=2, use_cache=True)


def _foreign_cache():
    plain = models.build("llama", **TWO).eval()
    cache = plain(models.token_ids(2, 6), use_cache=True).cache
    model = ndcompile.compile(plain, workers.mesh(TP2), backend="eager").eval()
    model(models.token_ids(2, 1), cache=cache)


def _tuples():
    model = ndcompile.compile(models.build("llama", **TWO), workers.mesh(TP2), backend="eager").eval()
    model(models.token_ids(2, 1), cache=((torch.ones(1), torch.ones(1)),))


def _no_cache():
    model = ndcompile.compile(models.build("llama", **TWO), workers.mesh(EP2), backend="eager").eval()
    model.generate(models.token_ids(2, 6), max_new_tokens=2, use_cache=False)


def _offloaded_cache():
    model = ndcompile.compile(models.build("llama", **TWO), workers.mesh(TP2), backend="eager").eval()
    model.generate(models.token_ids(2, 6), max_new_tokens=2, use_cache=True, cache_implementation="offloaded")


MISTAKES = {
    _offloaded_cache: "is an offloaded cache",
    _no_cache: "Use the cache",
    _other_prompts: "of one tp group were given different values of inputs",
    _foreign_cache: "Start with an empty cache",
    _tuples: "The cache argument is a tuple",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__[1:])
def test_mistakes_are_explained(world, mistake):
    for _, message in world(2).errors(mistake):
        assert MISTAKES[mistake] in message
