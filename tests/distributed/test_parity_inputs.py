"""Parity for what a call and a mesh may look like: label counts, sizes that differ, any numbering of the ranks."""

from dataclasses import replace

import models
import pytest
import torch
import workers
from matrix import sampled, sampled_rows
from parity_case import Case, assert_parity, batch, compare_models
from workers import FSDP2_TP2, REPLICATE2_TP2, TP2, TP2_FSDP2, error, gradient_errors

import ndcompile

ONE_LAYER = {"num_hidden_layers": 1}


def test_num_items_in_batch_times_data_ranks_is_the_full_batch(ranks, checkpoint):
    folder = checkpoint("llama", **ONE_LAYER)
    case = Case("llama", FSDP2_TP2, overrides=ONE_LAYER)
    for loss, gradients in ranks(_against_full_batch, case, folder):
        assert loss < workers.LIMIT
        assert max(gradients.values()) < workers.LIMIT, gradients


def _against_full_batch(case, folder):
    model = workers.compiled(case.model, case.layout, folder, case.overrides)
    reference = models.build(case.model, **case.overrides)
    world = ndcompile.data_world_size(model)
    batches = [batch(case, r) for r in range(world)]
    whole = {name: torch.cat([b[name] for b in batches]) for name in batches[0]}
    count = (whole["labels"][:, 1:] != -100).sum()
    expected = reference(**whole, use_cache=False).loss  # the mean over all labels of the batch
    expected.backward()
    loss = model(**batches[ndcompile.data_rank(model)], num_items_in_batch=int(count)).loss * world
    loss.backward()
    parts = [torch.zeros(()) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, loss.detach())
    total = torch.stack(parts).mean()
    return error(total, expected.detach()), gradient_errors(model, {n: p.grad for n, p in reference.named_parameters()})


def test_num_items_in_batch_as_a_tensor(world, checkpoint):
    case = Case("llama", (("fsdp", 2),), items="tensor", padding=True, overrides=ONE_LAYER)
    assert_parity(world(2), case, checkpoint("llama", **ONE_LAYER))


def test_batch_and_length_may_differ_between_data_ranks(ranks, checkpoint):
    case = Case("qwen2", REPLICATE2_TP2, ragged=True, padding=True, overrides=ONE_LAYER)
    assert_parity(ranks, case, checkpoint("qwen2", **ONE_LAYER))


def test_gradients_accumulate_over_two_batches(ranks, checkpoint):
    case = Case("llama", FSDP2_TP2, overrides=ONE_LAYER, step=True)
    assert_parity(ranks, case, checkpoint("llama", **ONE_LAYER), (0, 1))


@pytest.mark.parametrize("dynamic", sampled([None, True], 0))
def test_other_sizes_after_the_first_call(world, checkpoint, dynamic):
    folder = checkpoint("gemma2", **ONE_LAYER)
    results = world(2)(_three_shapes, dynamic, folder)
    programs = {None: 2, True: 1}[dynamic]
    for worst, count in results:
        assert worst < workers.LIMIT
        assert count == programs


def _three_shapes(dynamic, folder):
    """Worst error over three sizes, and the number of graphs that were captured for them."""
    case = Case("gemma2", TP2, padding=True, overrides=ONE_LAYER)
    model = workers.compiled("gemma2", TP2, folder, ONE_LAYER, dynamic=dynamic)
    reference = models.build("gemma2", **ONE_LAYER)
    worst = 0.0
    for shape in ((2, 12), (3, 17), (4, 9)):  # the sliding window is 8
        model.zero_grad()
        reference.zero_grad()
        result = compare_models(model, reference, replace(case, shape=shape))
        worst = max(worst, result.loss, *result.gradients.values())
    (signature,) = model.forward.signatures.values()
    return worst, len(signature.programs)


@pytest.mark.parametrize(
    ("layout", "order"),
    sampled_rows([(TP2_FSDP2, None), (FSDP2_TP2, (2, 0, 3, 1))], 1),
    ids=["tp_major", "permuted"],
)
def test_any_numbering_of_the_ranks(ranks, checkpoint, layout, order):
    case = Case("llama", layout, ranks=order, step=True, overrides=ONE_LAYER)
    assert_parity(ranks, case, checkpoint("llama", **ONE_LAYER))


def test_a_mesh_without_names_means_tp(world, checkpoint):
    folder = checkpoint("llama", **ONE_LAYER)
    assert world(2)(_unnamed_mesh, folder) == [{"dp_replicate": 1, "fsdp": 1, "tp": 2, "ep": 1}] * 2


def _unnamed_mesh(folder):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    model = ndcompile.compile(models.on_meta("llama", **ONE_LAYER), mesh, checkpoint=folder, backend="aot_eager")
    result = compare_models(model, models.build("llama", **ONE_LAYER), Case("llama", TP2))
    assert not result.exceeding(), result
    return dict(model.sharding_plan.sizes)
