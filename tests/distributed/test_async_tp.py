"""async_tp: gathers and reductions of the sequence inside of fused operators, and still the single-process model.

torch has the fused operators on CUDA alone. On gloo ranks they run by the definitions that torch gives their shapes
with: an all-gather, products, a reduce-scatter. So what is tested here is what the graphs compute, not the pipeline.
"""

import functools
import logging
from collections import Counter
from dataclasses import replace

import models
import pytest
import torch
import workers
from matrix import sampled
from parity_case import Case, batch, compare_models
from torch.distributed import _symmetric_memory as symmetric
from workers import FSDP2_TP2, TP2

import ndcompile
from ndcompile.errors import UnsupportedError
from ndcompile.lowering.async_tp import check_async_tp
from ndcompile.model_calls import compiled_model
from ndcompile.private.distributed import fused_all_gather_matmul

ONE = {"num_hidden_layers": 1}
SEQUENCE_PARALLEL = {"distributed_config": {"enable_sequence_parallel": True}}
GATHERS, SCATTERS = "all_gather_into_tensor", "reduce_scatter_tensor"
FUSED_GATHERS, FUSED_SCATTERS = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
FUSED_SUMS = "matmuls_reduce_scatter"
BFLOAT16 = 3e-2
"""bfloat16 keeps 8 bits, and with async_tp the sums over q, k and v are rounded at other places, 2 ** -8 each time."""


@functools.cache
def _operators_on_cpu():
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
    return library


def _compiled(case, checkpoint, async_tp=True):
    """The model of a case. What `ndcompile.compile` refuses on the CPU is switched on behind it."""
    _operators_on_cpu()
    options = {"backend": "aot_eager"} | SEQUENCE_PARALLEL | case.options
    model = workers.compiled(case.model, case.layout, checkpoint, case.overrides, case.dtype, **options)
    compiled = compiled_model(model)
    compiled.options = replace(compiled.options, async_tp=async_tp)
    return model


def _communication(model, group="tp"):
    """How often each operator that communicates over an axis is in the forward and the backward graph."""
    compiled = compiled_model(model)
    (signature,) = compiled.signatures.values()
    graphs, name = signature.programs[0].graphs, compiled.mesh.axes[group].group
    return [
        Counter(node.target._opname for node in gm.graph.nodes if node.op == "call_function" and name in node.args)
        for gm in (graphs.forward, graphs.backward)
    ]


def _comparison(case, checkpoint):
    return _parity(case, checkpoint, count=lambda model: None)[0]  # of what a cache holds there are no graphs


def _parity(case, checkpoint, count=_communication):
    model = _compiled(case, checkpoint)
    return compare_models(model, models.build(case.model, case.dtype, **case.overrides), case), count(model)


@pytest.mark.parametrize(
    "case",
    sampled(
        [
            Case("llama", TP2, overrides=ONE, padding=True),
            Case("llama", FSDP2_TP2, overrides={"num_hidden_layers": 2}, ragged=True, step=True),
            Case("qwen2", TP2, overrides=ONE, shape=(2, 13)),  # biases; uneven: products are of padded tokens
            Case("gpt_neox", TP2, overrides=ONE),  # one norm or two feed attention and MLP
            Case("phi3", (("tp", 4),), overrides=ONE, shape=(2, 5)),  # the last rank has no token
            Case("gemma2", TP2, overrides=ONE, shape=(1, 12), options={"loss_only": True}),  # one sequence
            Case("mixtral", TP2, overrides=ONE),
            Case("deepseek_v2", TP2, overrides=ONE, options={"memory_budget": "1GB"}),
        ],
        1,
        2,
        4,
    ),
    ids=lambda case: f"{case.model}-{case.shape[1]}",
)
def test_parity(world, checkpoint, case):
    folder = checkpoint(case.model, **case.overrides)
    for comparison, (forward, backward) in world(workers.size(case.layout))(_parity, case, folder):
        assert not comparison.exceeding()
        assert forward[FUSED_GATHERS]
        assert forward[FUSED_SCATTERS]
        assert backward[FUSED_GATHERS]


@pytest.mark.parametrize("layers", sampled([1, 3], 1))
def test_number_of_fused_operators(world, checkpoint, layers):
    """In forward q, k, v and gate, up share a gather, and so the head; in backward their gradients share a reduction.
    The embedding has no product."""
    overrides = {"num_hidden_layers": layers}
    case = Case("llama", TP2, overrides=overrides)
    for _, (forward, backward) in world(2)(_parity, case, checkpoint("llama", **overrides)):
        assert forward == {
            FUSED_GATHERS: 2 * layers + 1,
            FUSED_SCATTERS: 2 * layers,
            SCATTERS: 1,
            GATHERS: 1,  # logits
        }
        assert backward == {
            FUSED_GATHERS: 2 * layers,
            FUSED_SUMS: 2 * layers,
            FUSED_SCATTERS: 1,
            GATHERS: 1,
            "all_reduce": 2 * layers + 1,  # weights of norms
        }


def _both(case, checkpoint, autocast=False):
    """Losses and gradients without and with async_tp, and what the second one communicates with."""
    results = []
    for async_tp in (False, True):
        model = _compiled(case, checkpoint, async_tp)
        model.gradient_checkpointing_enable()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch(case, ndcompile.data_rank(model))).loss
        loss.backward()
        results.append({"loss": loss.detach()} | {name: workers.full(p.grad) for name, p in model.named_parameters()})
    return *results, _communication(model)


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.bfloat16, False), (torch.float32, True)])
def test_bfloat16(world, checkpoint, dtype, autocast):
    """Layers are checkpointed: what backward computes again has products of its own."""
    case = Case("llama", TP2, overrides=ONE, dtype=dtype)
    for without, with_, (forward, backward) in world(2)(_both, case, checkpoint("llama", **ONE), autocast):
        assert {name: e for name, x in without.items() if (e := workers.error(with_[name], x)) > BFLOAT16} == {}
        assert forward[FUSED_GATHERS] == 3
        assert backward[FUSED_GATHERS] == 2 + 2
        assert backward[FUSED_SUMS] + backward[FUSED_SCATTERS] >= 3


def _inference(checkpoint):
    model = _compiled(Case("llama", TP2, overrides=ONE), checkpoint)
    with torch.no_grad():
        model(**batch(Case("llama", TP2), 0))
    (signature,) = compiled_model(model).signatures.values()
    graph = signature.programs[0].graphs.forward.graph
    fused = graph.find_nodes(op="call_function", target=fused_all_gather_matmul)
    return [node.kwargs.get("return_A", True) for node in fused]


def test_gathered_tokens_are_not_kept_without_gradients(world, checkpoint):
    assert world(2)(_inference, checkpoint("llama", **ONE)) == [[False] * 3] * 2


def _said(checkpoint, options):
    """What the pass says about the graph of a forward call."""
    case = Case("llama", TP2, overrides=ONE, options=options)
    model, lines = _compiled(case, checkpoint), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("ndcompile.passes")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with torch.no_grad():
            model(**batch(case, 0))
    finally:
        logger.removeHandler(handler)
    return [line for line in lines if "async_tp" in line[1]]


def test_the_log_says_what_runs_beside_products(world, checkpoint):
    for ((level, line),) in world(2)(_said, checkpoint("llama", **ONE), {}):
        assert level == "INFO"
        assert "3 of 4 all-gathers and 2 of 3 reduce-scatters" in line


def test_the_log_warns_of_symbolic_sizes(world, checkpoint):
    for ((level, line),) in world(2)(_said, checkpoint("llama", **ONE), {"dynamic": True}):
        assert level == "WARNING"
        assert "0 of " in line
        assert "dynamic=False" in line


def test_the_pass_can_be_disabled(world, checkpoint):
    options = {"disable_passes": ["pipeline_matmuls"]}
    assert world(2)(_said, checkpoint("llama", **ONE), options) == [[], []]


def _without_boundaries(checkpoint):
    model = _compiled(Case("llama", TP2, options={"disable_passes": ["shard_sequence"]}, overrides=ONE), checkpoint)
    model(**batch(Case("llama", TP2), 0))


def test_a_graph_with_nothing_to_run_beside_is_refused(world, checkpoint):
    for kind, message in world(2).errors(_without_boundaries, checkpoint("llama", **ONE)):
        assert kind == "UnsupportedError"
        assert "LlamaForCausalLM" in message
        assert "compile without async_tp" in message


def _on_one_rank(checkpoint):
    case = Case("llama", TP2, overrides=ONE)
    _compiled(case, checkpoint, async_tp=torch.distributed.get_rank() == 0)(**batch(case, 0))


def test_ranks_that_differ_are_refused(world, checkpoint):
    for kind, message in world(2).errors(_on_one_rank, checkpoint("llama", **ONE)):
        assert kind == "AgreementError"
        assert "async_tp" in message


def _on_the_cpu():
    workers.compiled("llama", TP2, None, ONE, backend="aot_eager", async_tp=True, **SEQUENCE_PARALLEL)


def test_other_devices_are_refused(world):
    for kind, message in world(2).errors(_on_the_cpu):
        assert kind == "UnsupportedError"
        assert "'cpu'" in message


@pytest.mark.parametrize(
    ("device", "tp", "sequence_parallel", "missing"),
    [("cuda", 1, True, "tp axis"), ("cuda", 2, False, "enable_sequence_parallel=True"), ("cpu", 2, True, "CUDA")],
)
def test_the_error_names_what_is_missing(device, tp, sequence_parallel, missing):
    with pytest.raises(UnsupportedError, match=missing):
        check_async_tp(device, tp, sequence_parallel)


@pytest.mark.parametrize("other", [{"backend": "eager"}, {"dynamic": True}, {"cuda_graphs": True}])
def test_options_that_exclude_it_are_refused(other):
    with pytest.raises(ValueError, match="async_tp"):
        ndcompile.compile(models.on_meta("llama"), async_tp=True, **other)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 12), (1, 13)])
def test_parity_with_inductor(world, checkpoint, shape):
    """Four layers: those in the middle are one subgraph, with the fused operators in it."""
    four = {"num_hidden_layers": 4}
    case = Case("llama", TP2, shape=shape, overrides=four, options={"backend": "inductor"})
    for comparison in world(2)(_comparison, case, checkpoint("llama", **four)):
        assert not comparison.exceeding()
