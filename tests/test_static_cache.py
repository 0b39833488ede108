"""Static caches in one process: memory that stays, programs, and which of them become CUDA graphs."""

import logging
from dataclasses import replace

import models
import pytest
import torch
from transformers.cache_utils import StaticCache

import ndcompile
from ndcompile.capture.graph_input import ARGUMENT
from ndcompile.lowering.cuda_graphs import fixed_inputs
from ndcompile.model_calls import compiled_model
from ndcompile.verify.type_inference import written_arguments, written_memory

ONE = {"num_hidden_layers": 1}
IDS = models.token_ids(2, 12)
CUDA = torch.device("cuda")


@pytest.fixture
def model():
    return ndcompile.compile(models.build("llama", **ONE).eval(), backend="eager")


def _programs(model):
    return [program for signature in compiled_model(model).signatures.values() for program in signature.programs]


def _tensors(cache):
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values, layer.cumulative_length)]


def test_a_users_cache_is_written_in_place_by_prompt_and_tokens(model):
    cache, addresses, logits = StaticCache(config=model.config, max_cache_len=20), set(), []
    with torch.no_grad():
        whole = model(input_ids=IDS).logits
        for part in IDS.split([5, 4, 1, 1, 1], 1):
            output = model(input_ids=part, past_key_values=cache)
            logits.append(output.logits)
            addresses.add(tuple(tensor.data_ptr() for tensor in _tensors(cache)))
    assert output.cache is cache
    assert int(cache.get_seq_length()) == 12
    assert len(addresses) == 1
    assert len(_programs(model)) == 4  # without a cache; an empty one; one with tokens; a token more
    torch.testing.assert_close(torch.cat(logits, 1), whole, rtol=1e-5, atol=1e-5)


def test_a_cache_that_was_reset_serves_again(model):
    cache = StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad():
        first = model(input_ids=IDS, cache=cache).logits
        cache.reset()
        again = model(input_ids=IDS, cache=cache).logits
    torch.testing.assert_close(again, first, rtol=1e-5, atol=1e-5)


def test_a_token_more_makes_no_copy_of_the_cache(model):
    """Nothing as large as the keys is made: query heads that share a key head do not get copies of it either."""
    cache = StaticCache(config=model.config, max_cache_len=5000)
    with torch.no_grad():
        model(input_ids=IDS, cache=cache)
        model(input_ids=IDS[:, :1], cache=cache)
    graph = _programs(model)[-1].captured.module.graph
    given = {node.meta["val"].untyped_storage()._cdata for node in graph.find_nodes(op="placeholder")}
    made = [node for node in graph.nodes if not written_arguments(node)]
    made = [node.meta["val"] for node in made if isinstance(node.meta.get("val"), torch.Tensor)]
    made = [value for value in made if value.untyped_storage()._cdata not in given]
    assert max(value.numel() for value in made) < cache.layers[0].keys.numel()
    written = {node.meta["input"].name for node in written_memory(graph) if node.op == "placeholder"}
    assert written == {"[0]['keys']", "[0]['values']"}


def test_a_program_of_a_static_cache_can_be_recorded(model):
    cache = StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad():
        model(input_ids=IDS, cache=cache)
        model(input_ids=IDS[:, :1], cache=cache)
        recorded = [(program, fixed_inputs(program.captured, CUDA, "")) for program in _programs(model)]
    for program, fixed in recorded:
        assert {spec.kind for number, spec in enumerate(program.inputs) if number not in fixed} == {ARGUMENT}


@pytest.mark.parametrize(
    ("reason", "device", "grad", "dynamic", "arguments"),
    [
        ("the model is on cpu", torch.device("cpu"), False, None, {}),
        ("it computes gradients", CUDA, True, None, {}),
        ("its sizes are symbols (batch, sequence)", CUDA, False, True, {}),
        ("its key-value cache grows, from [0]['keys'] on", CUDA, False, None, {"use_cache": True}),
    ],
)
def test_the_log_says_why_there_is_no_cuda_graph(caplog, reason, device, grad, dynamic, arguments):
    model = ndcompile.compile(models.build("llama", **ONE).eval(), backend="eager", dynamic=dynamic)
    with torch.set_grad_enabled(grad), caplog.at_level(logging.WARNING, "ndcompile.cuda_graphs"):
        model(input_ids=IDS, **arguments)
        assert fixed_inputs(_programs(model)[0].captured, device, "Llama, batch 2") is None
    assert f"Llama, batch 2: no CUDA graph, as {reason}" in caplog.text


def test_generate_keeps_the_cache_for_its_cuda_graphs(model):
    """The same tensors serve the next prompt, of another length too; a cache that is returned is the caller's."""
    compiled = compiled_model(model)
    compiled.options = replace(compiled.options, cuda_graphs=True)  # on a CPU nothing is recorded
    arguments = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    arguments["cache_implementation"] = "static"
    plain = models.build("llama", **ONE).eval()
    addresses = set()
    for length in (12, 8):
        tokens = model.generate(IDS[:, :length], **arguments)
        assert torch.equal(tokens, plain.generate(IDS[:, :length], **arguments))
        addresses.add(compiled.kept_cache.cache.layers[0].keys.data_ptr())
    returned = model.generate(IDS, return_dict_in_generate=True, **arguments)
    assert len(addresses) == 1
    assert returned.cache.layers[0].keys.data_ptr() not in addresses


@pytest.mark.parametrize("chunk", [1, 4])
def test_chunks_of_a_prompt(model, chunk):
    """The first chunk goes into an empty cache, the others of the same shapes do not."""
    arguments = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    arguments |= {"cache_implementation": "static", "prefill_chunk_size": chunk}
    plain = models.build("llama", **ONE).eval()
    assert torch.equal(model.generate(IDS, **arguments), plain.generate(IDS, **arguments))


def test_a_static_cache_and_gradients_are_refused(model):
    with pytest.raises(ndcompile.UnsupportedError, match=r"torch\.no_grad"):
        model(input_ids=IDS, cache=StaticCache(config=model.config, max_cache_len=20))


def test_cuda_graphs_need_inductor():
    with pytest.raises(ValueError, match='needs backend="inductor"'):
        ndcompile.compile(models.build("llama", **ONE), backend="aot_eager", cuda_graphs=True)
