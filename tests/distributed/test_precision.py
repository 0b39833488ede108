"""torch.autocast and fsdp_mixed_precision, against single-process runs of the same precision."""

import models
import pytest
import torch
import workers
from transformers.distributed import DistributedConfig
from workers import FSDP2_TP2

import ndcompile
from ndcompile.model_calls import compiled_model

ONE = {"num_hidden_layers": 1}
BF16_LIMIT = 2e-2
"""bf16 keeps 8 bits: one rounding is 2**-9 = 0.002, and the sums over tp add in another order than one product."""


def _batch(rank):
    ids = models.token_ids(2, 8, seed=rank)
    return {"input_ids": ids, "labels": ids}


def _autocast(checkpoint):
    model = workers.compiled("llama", FSDP2_TP2, checkpoint, ONE, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(**_batch(ndcompile.data_rank(model)))
    output.loss.backward()
    outside = model(**_batch(ndcompile.data_rank(model))).logits
    gradients = {name: workers.full(p.grad) for name, p in model.named_parameters()}
    return output.loss.item(), output.logits.dtype, outside.dtype, gradients


def _assert_close(gradients, model, limit):
    top = max(p.grad.abs().max().item() for p in model.parameters())
    for name, parameter in model.named_parameters():
        assert gradients[name].dtype == torch.float32, name
        assert workers.error(gradients[name], parameter.grad, 1e-1 * top) < limit, name


@pytest.mark.slow
def test_autocast_equals_the_autocast_of_one_process(ranks, checkpoint):
    plain = models.build("llama", **ONE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [plain(**_batch(rank)).loss for rank in range(2)]
    (sum(losses) / 2).backward()
    for number, (loss, inside, outside, gradients) in enumerate(ranks(_autocast, checkpoint("llama", **ONE))):
        assert (inside, outside) == (torch.bfloat16, torch.float32)
        assert abs(loss - losses[number // 2].item()) < BF16_LIMIT * abs(loss)
        _assert_close(gradients, plain, BF16_LIMIT)


def _mixed(checkpoint):
    config = DistributedConfig(fsdp_mixed_precision=True)
    model = workers.compiled("llama", FSDP2_TP2, checkpoint, ONE, backend="aot_eager", distributed_config=config)
    output = model(**_batch(ndcompile.data_rank(model)))
    output.loss.backward()
    (signature,) = compiled_model(model).signatures.values()
    graphs = signature.programs[0].graphs
    collectives = {"forward": _dtypes(graphs.forward), "backward": _dtypes(graphs.backward)}
    gradients = {name: workers.full(p.grad) for name, p in model.named_parameters()}
    return output.loss.item(), output.logits.dtype, gradients, collectives, {p.dtype for p in model.parameters()}


def _dtypes(graph):
    """Collectives with the dtypes that they move."""
    c10d = [n for n in graph.graph.nodes if getattr(n.target, "namespace", "") == "_c10d_functional"]
    found = {(n.target._opname, n.meta["val"].dtype) for n in c10d}
    return {pair for pair in found if pair[0] in ("all_gather_into_tensor", "reduce_scatter_tensor")}


def test_fsdp_mixed_precision_gathers_bf16_and_reduces_and_keeps_float32(ranks, checkpoint):
    """The reference computes in bf16 from the same rounded weights; the mean over ranks is in float32, as here."""
    gradients, losses = None, []
    for rank in range(2):
        plain = models.build("llama", torch.bfloat16, **ONE)
        loss = plain(**_batch(rank)).loss
        loss.backward()
        losses.append(loss.item())
        own = {name: p.grad.float() / 2 for name, p in plain.named_parameters()}
        gradients = own if gradients is None else {name: gradients[name] + grad for name, grad in own.items()}
    reference = models.build("llama", **ONE)
    for name, parameter in reference.named_parameters():
        parameter.grad = gradients[name]
    for number, (loss, logits, own, collectives, masters) in enumerate(ranks(_mixed, checkpoint("llama", **ONE))):
        assert logits == torch.bfloat16
        assert masters == {torch.float32}
        assert ("reduce_scatter_tensor", torch.float32) in collectives["backward"]
        assert ("reduce_scatter_tensor", torch.bfloat16) not in collectives["backward"]
        assert {dtype for name, dtype in collectives["forward"] if name == "all_gather_into_tensor"} == {torch.bfloat16}
        assert abs(loss - losses[number // 2]) < BF16_LIMIT * abs(loss)
        _assert_close(own, reference, BF16_LIMIT)
