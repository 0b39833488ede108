"""Sizes of a config next to a user's mesh: those that the user gave must agree, those that were filled in do not count.

The ranks have the environment of torchrun, from which transformers fills in a tp_size for a config with a tp_plan.
"""

import models
import pytest
import workers
from transformers.distributed import DistributedConfig
from workers import FSDP2_TP2, FSDP4

import ndcompile

ONE = {"num_hidden_layers": 1}
WHOLE = {"gate_proj": "colwise_gather_output", "up_proj": "colwise_gather_output", "down_proj": "rowwise_split_input"}
RULES = {f"model.layers.*.mlp.{name}": style for name, style in WHOLE.items()}


def _loss_and_sizes(layout, rules, as_dict):
    config = {"tp_plan": rules}
    config = config if as_dict else DistributedConfig(**config)
    model = ndcompile.compile(
        models.build("llama", **ONE), workers.mesh(layout), distributed_config=config, backend="eager"
    )
    ids = models.token_ids(2, 8)
    expected = models.build("llama", **ONE)(input_ids=ids, labels=ids).loss
    loss = model(input_ids=ids, labels=ids).loss
    return dict(model.sharding_plan.sizes), workers.error(loss.detach(), expected.detach())


@pytest.mark.parametrize(
    ("layout", "rules", "as_dict"),
    [
        (FSDP2_TP2, RULES, True),
        (FSDP2_TP2, RULES, False),
        (FSDP2_TP2, "auto", True),
        (FSDP2_TP2, "auto", False),
        (FSDP2_TP2, "derive", True),
        (FSDP4, RULES, False),
    ],
)
def test_a_tp_plan_without_sizes_takes_those_of_the_mesh(ranks, layout, rules, as_dict):
    expected = {"dp_replicate": 1, "fsdp": 1, "tp": 1, "ep": 1} | dict(layout)
    for sizes, error in ranks(_loss_and_sizes, layout, rules, as_dict):
        assert sizes == expected
        assert error <= workers.LIMIT


def _compile(config):
    ndcompile.compile(models.on_meta("llama", **ONE), workers.mesh(FSDP2_TP2), distributed_config=config)


@pytest.mark.parametrize(
    "config",
    [{"tp_plan": RULES, "tp_size": 4}, {"fsdp_size": 4}, DistributedConfig(tp_plan=RULES, tp_size=1, fsdp_size=4)],
    ids=["tp_size", "fsdp_size", "config"],
)
def test_sizes_that_were_given_must_agree(ranks, config):
    for kind, message in ranks.errors(_compile, config):
        assert kind == "MeshError"
        assert "The mesh has dp_replicate=1, fsdp=2, tp=2, ep=1, but distributed_config asks for" in message


def test_a_misspelled_key_is_refused(ranks):
    for kind, message in ranks.errors(_compile, {"tp_plann": RULES}):
        assert kind == "MeshError"
        assert "distributed_config has unknown keys ['tp_plann']" in message
