"""Opaque modules on real ranks: weights are gathered over fsdp and tp, gradients reduced as ever."""

import pytest
from branching_model import TP_PLAN, Branching, OnShards, rows
from workers import FSDP2_TP2, LIMIT, REPLICATE2_FSDP2, TP2, Comparison, error, gradient_errors, mesh, size

import ndcompile


def _step(layout, backend) -> Comparison:
    plan = {"tp_plan": TP_PLAN} if "tp" in dict(layout) else None
    model, reference = (
        ndcompile.compile(Branching(), mesh(layout), distributed_config=plan, backend=backend),
        Branching(),
    )
    world, rank = ndcompile.data_world_size(model), ndcompile.data_rank(model)
    loss = model(rows(seed=rank))
    own = [reference(rows(seed=each)) for each in range(world)]
    loss.backward()
    (sum(own) / world).backward()
    gradients = gradient_errors(model, {name: p.grad for name, p in reference.named_parameters()})
    return Comparison(error(loss.detach(), own[rank].detach()), gradients)


@pytest.mark.parametrize(("layout", "backend"), [(FSDP2_TP2, "aot_eager"), (REPLICATE2_FSDP2, "eager")])
def test_loss_and_gradients_are_those_of_one_process(world, layout, backend):
    for comparison in world(size(layout))(_step, layout, backend):
        assert not comparison.exceeding(LIMIT)


def _on_shards(**options) -> float:
    plan = {"tp_plan": {"up": "colwise", "down": "rowwise"}}
    model = ndcompile.compile(OnShards(), mesh(TP2), distributed_config=plan, backend="eager", **options)
    return model(rows()).item()


@pytest.mark.parametrize("verify", ["error", "off"])
def test_what_a_module_would_do_with_a_shard_is_refused(world, verify):
    for kind, message in world(2).errors(_off if verify == "off" else _on_shards):
        assert kind == "VerifyError"
        assert "between" in message


def _off() -> float:
    return _on_shards(verify="off")
