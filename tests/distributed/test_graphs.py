"""The graph as text: what capture gives, what every pass changes, and the collectives that the lowered graphs run.

`UPDATE_GOLDEN=1 pytest tests/distributed/test_graphs.py` writes the golden files anew; read the difference.
"""

import difflib
import os
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
import workers
from golden_text import golden_torch
from matrix import sampled_rows
from workers import FSDP2_TP2, FSDP4, REPLICATE2_FSDP2, REPLICATE2_TP2, TP2, size

import ndcompile
from ndcompile.capture.call import bind
from ndcompile.capture.capture import capture
from ndcompile.graphs.dump import dump
from ndcompile.model_calls import compiled_model
from ndcompile.pipeline import pass_names, run_passes

GOLDEN = Path(__file__).parent.parent / "golden"


def _stages(layout):
    """The captured graph, and the changed lines after every pass."""
    compiled = compiled_model(workers.compiled("llama", layout, None, {"num_hidden_layers": 1}))
    ids = torch.zeros(2, 8, dtype=torch.int64)
    call = bind(compiled.__signature__, (), {"input_ids": ids, "labels": ids.clone()})
    captured = capture(compiled.shadow, compiled.model, call, dynamic=False)
    groups = {axis.group: name for name, axis in compiled.mesh.axes.items()}
    stages, previous = [], None

    def observe(name, module):
        nonlocal previous
        text = dump(module.graph, groups).splitlines()
        if previous is None:
            stages.append(f"== {name} ==\n" + "\n".join(text))
        else:
            changes = [
                line for line in difflib.unified_diff(previous, text, n=0, lineterm="") if line[:2] not in ("--", "++")
            ]
            stages.append(f"== after {name} ==\n" + "\n".join(line for line in changes if not line.startswith("@@")))
        previous = text

    run_passes(captured, compiled.pass_context(captured), (), observe)
    return "\n\n".join(stage.rstrip() for stage in stages) + "\n"


@golden_torch
@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama_tp2", TP2), ("llama_fsdp2", (("fsdp", 2),)), ("llama_replicate2_fsdp2", REPLICATE2_FSDP2)],
)
def test_golden_graphs(world, name, layout):
    texts = world(size(layout))(_stages, layout)
    assert len(set(texts)) == 1, "ranks captured different graphs"
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(texts[0])
    assert texts[0] == golden.read_text(), "\n".join(
        difflib.unified_diff(golden.read_text().splitlines(), texts[0].splitlines(), n=1, lineterm="")
    )


def test_golden_graphs_show_every_pass():
    for file in GOLDEN.glob("*.txt"):
        sections = [line[3:-3] for line in file.read_text().splitlines() if line.startswith("== ")]
        assert sections == ["captured"] + [f"after {name}" for name in pass_names()]


def _counts(layout, layers, tied, keep=False):
    overrides = {"num_hidden_layers": layers, "tie_word_embeddings": tied}
    plan = {"model.layers.*": "keep_full_weight"} if keep else None
    config = {"fsdp_plan": plan} if plan else None
    model = workers.compiled("llama", layout, None, overrides, backend="aot_eager", distributed_config=config)
    if dist.get_rank() != 0:  # one rank's graph is every rank's, see test_golden_graphs
        return {}
    counts = ndcompile.lower_only(model, 2, 8).collective_counts()
    return {name: dict(counter) for name, counter in counts.items()}


def _expected(layout, layers, tied, keep=False):
    """The closed form for llama: 9 weights a layer; embedding, final norm and head besides.

    tp: forward sums two outputs a layer and the embedding, and gathers the logits; backward sums the gradient of two
    inputs a layer and of the head's input. fsdp: forward gathers every weight once and backward reduces every gradient;
    the weights of the layers are gathered again in backward unless kept. Norm and head are kept by the plan, and the
    backward of an embedding does not need its weight.
    """
    axes = dict(layout)
    weights = 9 * layers + (2 if tied else 3)
    forward = {"all_gather_into_tensor": 0, "all_reduce": 0}
    backward = {"all_gather_into_tensor": 0, "all_reduce": 0, "reduce_scatter_tensor": 0}
    if "tp" in axes:
        forward["all_reduce"] += 2 * layers + 1
        forward["all_gather_into_tensor"] += 1
        backward["all_reduce"] += 2 * layers + 1
    if "fsdp" in axes:
        forward["all_gather_into_tensor"] += weights
        backward["reduce_scatter_tensor"] += weights
        backward["all_gather_into_tensor"] += 0 if keep else 9 * layers
    if "dp_replicate" in axes:
        backward["all_reduce"] += weights
    parts = {"forward": forward, "backward": backward}
    return {name: {kind: n for kind, n in counts.items() if n} for name, counts in parts.items()}


@pytest.mark.parametrize(
    ("layout", "layers", "tied"),
    sampled_rows(
        [
            (TP2, 3, True),
            (FSDP4, 2, True),
            (FSDP2_TP2, 2, False),
            (REPLICATE2_FSDP2, 1, True),
            (REPLICATE2_TP2, 2, False),
        ],
        2,
        3,
    ),
)
def test_collective_counts_are_a_closed_form(world, layout, layers, tied):
    assert world(size(layout))(_counts, layout, layers, tied)[0] == _expected(layout, layers, tied)


def test_kept_weights_are_not_gathered_again(ranks):
    assert ranks(_counts, FSDP4, 2, False, True)[0] == _expected(FSDP4, 2, False, keep=True)


def _layer_cost(layout):
    """Collectives that one more layer adds."""
    one, two = (_counts(layout, layers, False) for layers in (1, 2))
    return two and {part: {kind: two[part][kind] - one[part].get(kind, 0) for kind in two[part]} for part in two}


def test_a_layer_on_fsdp_and_tp_costs_no_more_than_its_plan_says(ranks):
    forward = {"all_gather_into_tensor": 9, "all_reduce": 2}
    backward = {"all_gather_into_tensor": 9, "all_reduce": 2, "reduce_scatter_tensor": 9}
    assert ranks(_layer_cost, FSDP2_TP2)[0] == {"forward": forward, "backward": backward}


def test_models_of_this_file_are_the_zoo_llama():
    """The closed form counts the weights of a layer by hand."""
    names = [n for n, _ in models.on_meta("llama").named_parameters() if n.startswith("model.layers.0.")]
    assert len(names) == 9
