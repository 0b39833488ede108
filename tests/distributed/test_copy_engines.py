"""copy_engines: weights and gradients that move by copies and flags, and still the single-process model.

Here the protocol runs between processes, in memory of the host (host_lanes.py). Streams and copies of GPUs are run by
bench/copy_engines.py and bench/gpu_parity.py --copy-engines.
"""

import contextlib
from collections import Counter
from dataclasses import replace
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
import workers
from host_lanes import HOST, host_instead_of_gpus
from matrix import sampled
from parity_case import Case, batch, compare_models
from workers import FSDP2_TP2, FSDP4, REPLICATE2_FSDP2

import ndcompile
from ndcompile.copy_engines.connect import check_copy_engines
from ndcompile.copy_engines.group import CopyGroup
from ndcompile.errors import UnsupportedError
from ndcompile.model_calls import compiled_model

ONE = {"num_hidden_layers": 1}
FSDP2 = (("fsdp", 2),)
FSDP2_EP2 = (("fsdp", 2), ("ep", 2))
EP4 = {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}
MIXED = {"distributed_config": {"fsdp_mixed_precision": True}}


def _compiled(case, checkpoint, machine=HOST, **options):
    options = {"backend": "aot_eager", "copy_engines": True} | case.options | options
    with host_instead_of_gpus(machine):
        return workers.compiled(case.model, case.layout, checkpoint, case.overrides, case.dtype, **options)


def _communication(model):
    """How often each collective is in the forward and the backward graph, by the group that it names."""
    compiled = compiled_model(model)
    (signature,) = compiled.signatures.values()
    graphs = signature.programs[0].graphs
    names = {axis.group: axis.name for axis in compiled.mesh.axes.values()}
    names |= {copies: f"{names[group]} by copies" for group, copies in compiled.connection.copies.items()}
    return [
        Counter(
            f"{node.target._opname} {names[node.args[-1]]}"
            for node in gm.graph.nodes
            if node.op == "call_function" and node.args and node.args[-1] in names
        )
        for gm in (graphs.forward, graphs.backward)
    ]


def _parity(case, checkpoint):
    model = _compiled(case, checkpoint)
    return compare_models(model, models.build(case.model, case.dtype, **case.overrides), case)


@pytest.mark.parametrize(
    "case",
    sampled(
        [
            Case("llama", FSDP4, ragged=True, step=True),
            Case("llama", FSDP2_TP2, overrides=ONE, padding=True, options={"backend": "inductor"}),
            Case("qwen3_moe", FSDP2_EP2, overrides=ONE, step=True),
            Case("llama", REPLICATE2_FSDP2, overrides=ONE),
            Case("qwen2", FSDP4, overrides={"vocab_size": 129, "num_hidden_layers": 1}),  # 129 is padded to 132
            Case("gemma2", FSDP4, overrides=ONE),
            Case("llama", FSDP4, overrides=ONE, options={"loss_only": True}),
            Case("mixtral", FSDP2_TP2, overrides=ONE, options={"distributed_config": EP4}),
            Case("llama", FSDP2, overrides=ONE, options={"dynamic": True}),
        ],
        4,
    ),
    ids=str,
)
def test_parity(world, checkpoint, case):
    for comparison in world(workers.size(case.layout))(_parity, case, checkpoint(case.model, **case.overrides)):
        assert not comparison.exceeding()


def _graphs(case, checkpoint):
    model = _compiled(case, checkpoint)
    model(**batch(case, ndcompile.data_rank(model))).loss.backward()
    return _communication(model)


def test_weights_are_gathered_and_gradients_reduced_by_copies_alone(world, checkpoint):
    gathers, reductions = "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"
    case = Case("llama", FSDP2_TP2, overrides=ONE)
    for forward, backward in world(4)(_graphs, case, checkpoint("llama", **ONE)):
        assert {name for name in forward if "fsdp" in name} == {f"{gathers} fsdp by copies"}
        weights = forward[f"{gathers} fsdp by copies"]
        assert weights == 12  # embedding, seven products and two norms of the layer, a norm, head
        assert {name for name in backward if "fsdp" in name} == {
            f"{gathers} fsdp by copies",
            f"{reductions} fsdp by copies",
        }
        assert backward[f"{reductions} fsdp by copies"] == weights
        assert any(name.endswith(" tp") for name in forward)


def _bits(case, checkpoint):
    """Losses and gradients of two steps without and with copies, of the same batches."""
    found = []
    for copies in (False, True):
        model = _compiled(case, checkpoint, copy_engines=copies)
        for seed in (0, 1):
            model(**batch(case, ndcompile.data_rank(model), seed)).loss.backward()
        found.append({name: workers.full(p.grad) for name, p in model.named_parameters()})
    return [name for name, grad in found[0].items() if not torch.equal(grad, found[1][name])]


def test_two_ranks_reduce_to_the_same_bits_as_gloo(world, checkpoint):
    """A sum of two numbers has one order."""
    case = Case("llama", FSDP2, overrides=ONE)
    assert world(2)(_bits, case, checkpoint("llama", **ONE)) == [[], []]


def _mixed(case, checkpoint):
    """Casts are gathered, which nobody shares: they go through slots."""
    errors = []
    for copies in (False, True):
        model = _compiled(case, checkpoint, copy_engines=copies, **MIXED)
        reference = models.build(case.model, case.dtype, **case.overrides)
        errors.append(compare_models(model, reference, case))
    return errors


def test_mixed_precision(world, checkpoint):
    """The error is that of bfloat16, as large without copies."""
    case = Case("llama", FSDP2, overrides=ONE)
    for without, beside in world(2)(_mixed, case, checkpoint("llama", **ONE)):
        assert beside.loss == without.loss
        assert beside.gradients == pytest.approx(without.gradients, rel=1e-3)


def _accumulated(case, checkpoint):
    model = _compiled(case, checkpoint)
    rank = ndcompile.data_rank(model)
    for seed in range(3):
        model(**batch(case, rank, seed)).loss.backward()
    expected = {name: workers.full(p.grad).clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with ndcompile.no_sync(model):
        model(**batch(case, rank, 0)).loss.backward()
        model(**batch(case, rank, 1)).loss.backward()
    model(**batch(case, rank, 2)).loss.backward()
    return max(workers.gradient_errors(model, expected).values())


def test_gradients_that_are_held_are_reduced_once(world, checkpoint):
    case = Case("llama", FSDP2, overrides=ONE)
    assert max(world(2)(_accumulated, case, checkpoint("llama", **ONE))) < 2e-6


def _shared(case, checkpoint):
    """Whether parameters are in memory that others read, also after one rank gave them new tensors; and the losses."""
    model, arguments = _compiled(case, checkpoint), batch(case, 0)
    (arena,) = compiled_model(model).connection.arenas
    model._apply(lambda parameter: parameter.view_as(parameter))  # new tensors, in the memory where they were
    local = [p.to_local() for p in model.parameters()]
    elsewhere = True
    before = all(arena.everywhere(each.data_ptr()) for each in local)
    losses = [model(**arguments).loss.item()]
    if dist.get_rank() == 1:
        model._apply(torch.clone)
        elsewhere = not any(arena.everywhere(p.to_local().data_ptr()) for p in model.parameters())
    losses.append(model(**arguments).loss.item())
    after = all(arena.everywhere(p.to_local().data_ptr()) for p in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    losses.append(model(**arguments).loss.item())
    plain = _compiled(case, checkpoint, copy_engines=False)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.5)
    return before and elsewhere, after, losses, plain(**arguments).loss.item()


def test_parameters_stay_in_memory_that_others_read(world, checkpoint):
    for before, after, losses, expected in world(2)(_shared, Case("llama", FSDP2), checkpoint("llama")):
        assert before
        assert after
        assert losses[0] == losses[1]
        assert losses[2] == expected != losses[0]


def _of_experts(case, checkpoint):
    """Which parameters are in memory that their group reads, and how many arenas there are."""
    model = _compiled(case, checkpoint)
    connection = compiled_model(model).connection
    return set(connection.shards) == {name for name, _ in model.named_parameters()}, len(connection.arenas)


def test_experts_have_memory_of_their_own_group(world, checkpoint):
    experts = {"distributed_config": {"fsdp_size": 4, "ep_size": 2}}
    case = Case("qwen3_moe", FSDP4, overrides=ONE, options=experts)
    assert world(4)(_of_experts, case, checkpoint("qwen3_moe", **ONE)) == [(True, 2)] * 4


def _offloaded(case, checkpoint):
    model = _compiled(case, checkpoint, distributed_config={"fsdp_cpu_offload": True})
    return dict(compiled_model(model).connection.shards)


def test_parameters_in_host_memory_are_not_shared(world, checkpoint):
    assert world(2)(_offloaded, Case("llama", FSDP2, overrides=ONE), checkpoint("llama", **ONE)) == [{}, {}]


def _without_memory(checkpoint, what):
    def fails(*_):
        raise torch.OutOfMemoryError("2 GB asked for, 1 GB free")

    machine = replace(HOST, **{what: fails}) if dist.get_rank() == 1 else HOST
    _compiled(Case("llama", FSDP2, overrides=ONE), checkpoint, machine)


def test_memory_that_one_rank_lacks_is_an_error_of_all(world, checkpoint):
    for kind, message in world(2).errors(_without_memory, checkpoint("llama", **ONE), "allocate"):
        assert kind == "UnsupportedError"
        assert "rank 1: 2 GB asked for, 1 GB free" in message
        assert "compile without copy_engines" in message


def _stopped_apart(case, checkpoint):
    """An error of one rank in front of its last reduction, and of the other one behind it; then a step."""
    model = _compiled(case, checkpoint)
    arguments = batch(case, ndcompile.data_rank(model))
    name = "reduce_scatter_tensor_coalesced" if dist.get_rank() == 0 else "_reduced"
    error = mock.patch.object(CopyGroup, name, side_effect=torch.OutOfMemoryError("out of memory"))
    with error, contextlib.suppress(RuntimeError):
        model(**arguments).loss.backward()
    model(**arguments)


def test_ranks_that_stopped_at_different_collectives_do_not_go_on(world, checkpoint):
    pool = world(2)
    try:
        errors = pool.errors(_stopped_apart, Case("llama", FSDP2, overrides=ONE), checkpoint("llama", **ONE))
    finally:
        pool.stop()  # they left the groups of the mesh
    assert [kind for kind, _ in errors] == ["AgreementError"] * 2


def _cast(case, checkpoint):
    model = _compiled(case, checkpoint)
    model.to(torch.bfloat16)
    model(**batch(case, 0))


def test_a_parameter_of_another_size_is_refused(world, checkpoint):
    for kind, message in world(2).errors(_cast, Case("llama", FSDP2, overrides=ONE), checkpoint("llama", **ONE)):
        assert kind == "UnsupportedError"
        assert "model.embed_tokens.weight" in message
        assert "copy_engines=True" in message


def _two_models(case, checkpoint):
    """Models on one mesh share its groups; each has memory of its own for its parameters."""
    first, second = _compiled(case, checkpoint), _compiled(case, checkpoint)
    arguments = batch(case, ndcompile.data_rank(first))
    losses = [model(**arguments).loss for model in (first, second, first)]
    sum(losses).backward()
    groups = {id(group) for each in (first, second) for group in compiled_model(each).mesh.copies.values()}
    gradients = [[workers.full(p.grad) for p in model.parameters()] for model in (first, second)]
    twice = all(torch.allclose(a, 2 * b, rtol=1e-5) for a, b in zip(*gradients, strict=True))
    return len(groups), len({loss.item() for loss in losses}), twice


def test_models_on_one_mesh_share_its_groups(world, checkpoint):
    case = Case("llama", FSDP2, overrides=ONE)
    assert world(2)(_two_models, case, checkpoint("llama", **ONE)) == [(1, 1, True)] * 2


def _on_one_rank(checkpoint):
    _compiled(Case("llama", FSDP2, overrides=ONE), checkpoint, copy_engines=dist.get_rank() == 0)


def test_ranks_that_differ_are_refused(world, checkpoint):
    for kind, message in world(2).errors(_on_one_rank, checkpoint("llama", **ONE)):
        assert kind == "AgreementError"
        assert "copy_engines" in message


def _on_the_cpu():
    workers.compiled("llama", FSDP2, None, ONE, backend="aot_eager", copy_engines=True)


def _other_passes():
    disabled = ["coalesce_collectives"] if dist.get_rank() else []
    workers.compiled("llama", FSDP2, None, ONE, backend="aot_eager", disable_passes=disabled)


def test_ranks_that_leave_out_other_passes_are_refused(world):
    for kind, message in world(2).errors(_other_passes):
        assert kind == "AgreementError"
        assert "disable_passes" in message


def test_other_devices_are_refused(world):
    for kind, message in world(2).errors(_on_the_cpu):
        assert kind == "UnsupportedError"
        assert "'cpu'" in message


@pytest.mark.parametrize(("device", "fsdp", "missing"), [("cuda", 1, "fsdp axis"), ("cpu", 2, "CUDA")])
def test_the_error_names_what_is_missing(device, fsdp, missing):
    with pytest.raises(UnsupportedError, match=missing):
        check_copy_engines(device, fsdp)


@pytest.mark.parametrize(
    "other", [{"backend": "eager"}, {"cuda_graphs": True}, {"disable_passes": ["use_copy_engines"]}]
)
def test_options_that_exclude_it_are_refused(other):
    with pytest.raises(ValueError, match="copy_engines"):
        ndcompile.compile(models.on_meta("llama"), copy_engines=True, **other)
