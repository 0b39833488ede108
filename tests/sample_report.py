"""A report built by hand: Qwen3-30B-A3B on fsdp=4 x tp=2 with ep=4, batch 1 and 4096 tokens on every data rank."""

from __future__ import annotations

from math import prod

from ndcompile.inspection.report import (
    BoundaryRow,
    CollectiveRow,
    Figure,
    ParameterRow,
    PassRow,
    PathStep,
    Report,
)

TP, EP_REST, EFSDP = 2, 2, 2
DENSE = {"ep_rest": "S(0)", "efsdp": "S(0)"}
LINK, COMPUTE = 450e9, 989e12


def sample_report(layers: int = 48) -> Report:
    """Sizes are those of the model, and figures are computed from the rows."""
    parameters, collectives, path = _parameters(layers), _collectives(layers), _path(layers)
    computing = sum(step.seconds for step in path if step.what == "compute")
    exposed = sum(step.seconds for step in path if step.what != "compute")
    sending = sum(row.seconds for row in collectives)
    stored = sum(2 * len(row.fqns) * prod(row.local_shape) for row in parameters)
    return Report(
        model="Qwen3MoeForCausalLM",
        mesh={"dp_replicate": 1, "fsdp": 4, "tp": TP, "ep": 4},
        storage={"tp": TP, "ep_rest": EP_REST, "efsdp": EFSDP},
        batch_size=1,
        seq_len=4096,
        parameters=parameters,
        boundaries=_boundaries(layers),
        collectives=collectives,
        passes=_passes(),
        memory=_memory(stored),
        compute=(
            Figure("FLOPs of matrix products", 37.6e12, "2 x rows x inner x columns, forward and backward"),
            Figure("FLOPs of attention", 3.6e12, "2 products forward, 5 backward; half of it where it is causal"),
            Figure("matrix products", 37.6e12 / (COMPUTE * 0.7), "FLOPs / (peak of the dtype x 0.7), summed"),
            Figure("attention", 3.6e12 / (COMPUTE * 0.35), "the same with 0.35 of the peak"),
        ),
        time=(
            Figure("computation", computing, "sum over the kernels of forward and backward"),
            Figure("communication", sending, "sum over the collectives of forward and backward: sent / link bandwidth"),
            Figure("exposed communication", exposed, "collectives on the critical path"),
            Figure("exposed share", exposed / sending, "exposed communication / communication"),
            Figure("step", computing + exposed, "seconds of the critical path"),
        ),
        critical_path=path,
        rates={
            "name": "H100, NVLink",
            "link_bandwidth": LINK,
            "link_latency": 3.4e-6,
            "ranks_a_node": 8,
            "matmul_fraction": 0.7,
            "flops.bfloat16": COMPUTE,
        },
        experts=(
            f"model.layers.*.mlp.experts x {layers}: 128 experts, 32 on a rank: all_to_all "
            "(ranks have batches of their own, which gathering would put on every rank)",
        ),
        notes=("Activations assume that tokens are spread evenly over the experts.",),
    )


def _parameters(layers: int) -> tuple[ParameterRow, ...]:
    attention, mlp = "model.layers.*.self_attn.", "model.layers.*.mlp."
    return (
        _row(layers, "model.embed_tokens.weight", (151936, 2048), {"tp": "S(0)"}, (18992, 2048), "embedding_rowwise"),
        _row(layers, attention + "q_proj.weight", (4096, 2048), {"tp": "S(0)"}, (512, 2048), "colwise"),
        _row(layers, attention + "k_proj.weight", (512, 2048), {"tp": "S(0)"}, (64, 2048), "colwise"),
        _row(layers, attention + "v_proj.weight", (512, 2048), {"tp": "S(0)"}, (64, 2048), "colwise"),
        _row(layers, attention + "o_proj.weight", (2048, 4096), {"tp": "S(1)"}, (512, 2048), "rowwise"),
        _row(layers, attention + "q_norm.weight", (128,), {"tp": "R"}, (32,), "replicated_with_grad_allreduce"),
        _row(layers, attention + "k_norm.weight", (128,), {"tp": "R"}, (32,), "replicated_with_grad_allreduce"),
        _row(layers, mlp + "gate.weight", (128, 2048), {"tp": "R"}, (32, 2048), ""),
        _row(layers, mlp + "experts.gate_up_proj", (128, 1536, 2048), {"tp": "S(0)"}, (16, 1536, 2048), "grouped_gemm"),
        _row(layers, mlp + "experts.down_proj", (128, 2048, 768), {"tp": "S(0)"}, (16, 2048, 768), "grouped_gemm"),
        _row(layers, "model.layers.*.input_layernorm.weight", (2048,), {"tp": "R"}, (512,), ""),
        _row(layers, "model.layers.*.post_attention_layernorm.weight", (2048,), {"tp": "R"}, (512,), ""),
        _row(layers, "model.norm.weight", (2048,), {"tp": "R"}, (512,), ""),
        _row(layers, "lm_head.weight", (151936, 2048), {"tp": "S(0)"}, (18992, 2048), "colwise_gather_output"),
    )


def _row(
    layers: int, name: str, shape: tuple[int, ...], tp: dict[str, str], local: tuple[int, ...], style: str
) -> ParameterRow:
    expert = ".experts." in name
    plan = "base_model_ep_plan" if expert else "base_model_tp_plan"
    key = name.removesuffix(".weight").removeprefix("model.")
    return ParameterRow(
        name=name,
        fqns=tuple(name.replace("*", str(layer)) for layer in range(layers)) if "*" in name else (name,),
        aliases=(),
        shape=shape,
        dtype="bfloat16",
        placements=tp | DENSE,
        local_shape=local,
        rule=f"{plan}['{key}'] = {style}" if style else "default: replicated over tp",
        style=style or "replicate",
        after_forward="keep" if name == "lm_head.weight" else "free",
        expert=expert,
    )


def _boundaries(layers: int) -> tuple[BoundaryRow, ...]:
    hidden, layer = 4096 * 2048 * 2, "model.layers.*."
    return (
        BoundaryRow("model.embed_tokens", "tp", "P", "I", "all_reduce", "", hidden, 1),
        BoundaryRow(layer + "self_attn.q_proj, k_proj, v_proj", "tp", "I", "R", "", "all_reduce", hidden, layers),
        BoundaryRow(layer + "self_attn.o_proj", "tp", "P", "I", "all_reduce", "", hidden, layers),
        BoundaryRow(layer + "mlp.experts", "tp", "I", "S(0)", "", "all_gather", hidden, layers),
        BoundaryRow(layer + "mlp.experts", "ep", "S(0)", "S(0)", "all_to_all", "all_to_all", hidden * 4, 2 * layers),
        BoundaryRow(layer + "mlp.experts", "tp", "S(0)", "I", "all_gather", "", hidden // 2, layers),
        BoundaryRow("lm_head", "tp", "I", "R", "", "all_reduce", hidden, 1),
        BoundaryRow("lm_head", "tp", "S(2)", "I", "all_gather", "", 4096 * 75968 * 2, 1),
    )


def _collectives(layers: int) -> tuple[CollectiveRow, ...]:
    dense = 2 * (2 * 75968 * 2048 + layers * (2048 * 2048 * 2 + 2 * 256 * 2048 + 128 * 2048 + 2 * 2048 + 256))
    experts = 2 * layers * 32 * 2048 * 768 * 3
    hidden = 4096 * 2048 * 2
    return (
        _collective("all_gather", "fsdp", 4, "forward", "parameters", 9 * layers + 3, dense),
        _collective("all_gather", "efsdp", 2, "forward", "parameters", 2 * layers, experts),
        _collective("all_gather", "fsdp", 4, "backward", "parameters", 9 * layers + 2, dense - 75968 * 2048 * 2),
        _collective("all_gather", "efsdp", 2, "backward", "parameters", 2 * layers, experts),
        _collective("reduce_scatter", "fsdp", 4, "backward", "gradients", 9 * layers + 3, dense),
        _collective("reduce_scatter", "efsdp", 2, "backward", "gradients", 2 * layers, experts),
        _collective("all_reduce", "tp", 2, "forward", "activations", layers + 1, (layers + 1) * hidden),
        _collective("all_gather", "tp", 2, "forward", "activations", layers + 1, layers * hidden + 4096 * 151936 * 2),
        _collective("all_reduce", "tp", 2, "backward", "activations", layers + 1, (layers + 1) * hidden),
        _collective("all_gather", "tp", 2, "backward", "activations", layers, layers * hidden),
        _collective("all_reduce", "tp", 2, "backward", "gradients", 2 * layers, 2 * layers * 256),
        _collective("all_to_all", "ep", 4, "forward", "experts", 3 * layers, 2 * layers * hidden * 4),
        _collective("all_to_all", "ep", 4, "backward", "experts", 2 * layers, 2 * layers * hidden * 4),
    )


def _collective(kind: str, axis: str, ranks: int, phase: str, purpose: str, count: int, nbytes: int) -> CollectiveRow:
    sent = (2 if kind == "all_reduce" else 1) * nbytes * (ranks - 1) // ranks
    return CollectiveRow(kind, axis, ranks, phase, purpose, count, nbytes, sent, sent / LINK)


def _passes() -> tuple[PassRow, ...]:
    return (
        PassRow("capture", "the forward of one rank", 4713, {}, {}),
        PassRow("complete_boundaries", "missing gradient reductions", 4809, {"redistribute": 96}, {}),
        PassRow("merge_boundaries", "one I -> R for q, k and v", 4713, {}, {"redistribute": 96}),
        PassRow("unshard_parameters", "all-gather of every parameter", 5775, {"unshard": 531, "view": 531}, {}),
    )


def _memory(stored: int) -> tuple[Figure, ...]:
    activations, gathered = 9_437_184_000, 1_207_959_552
    return (
        Figure("parameters", stored, "sum of local shapes x 2 bytes (bfloat16)"),
        Figure("gradients", stored, "as the parameters: one gradient each, in bfloat16"),
        Figure("optimizer", 2 * stored, "AdamW: two states each, in bfloat16"),
        Figure("activations", activations, "saved for backward, after recompute of gathered weights"),
        Figure("peak", 4 * stored + activations + gathered, "the largest sum of live tensors"),
    )


def _path(layers: int) -> tuple[PathStep, ...]:
    steps = [PathStep("all_gather over fsdp", "model.embed_tokens", "forward", 0.0010)]
    for phase, scale in (("forward", 1.0), ("backward", 1.9)):
        for layer in range(layers) if phase == "forward" else reversed(range(layers)):
            module = f"model.layers.{layer}"
            steps += [
                PathStep("compute", f"{module}.self_attn", phase, 0.00021 * scale),
                PathStep("all_reduce over tp", f"{module}.self_attn.o_proj", phase, 0.00004 * scale),
                PathStep("all_to_all over ep", f"{module}.mlp.experts", phase, 0.00016 * scale),
                PathStep("compute", f"{module}.mlp.experts", phase, 0.00036 * scale),
                PathStep("all_gather over efsdp", f"{module}.mlp.experts", phase, 0.00018 * scale),
            ]
    return (*steps, PathStep("compute", "lm_head", "backward", 0.0046))
