"""Loading real transformers checkpoints into the slices of a rank."""

from __future__ import annotations

import pytest
import torch
from loader_support import assert_holds, on_meta, rewrite, targets_of, tiny_model
from transformers import AutoModelForCausalLM

from ndcompile.loader import CheckpointError, buffer_targets, load_into, materialize_buffers
from ndcompile.loader.progress import transfer_progress

PLAIN = ["llama", "qwen2", "gemma2", "gemma3_text", "gpt_neox", "gpt2", "apertus", "phi3", "gpt_oss"]
CONVERTED = ["mixtral", "deepseek_v3", "qwen3_moe", "ernie4_5_moe"]
LAST = ((2, 3), (1, 2))


@pytest.fixture
def llama(tmp_path):
    """A tiny Llama, untied, saved as one file."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    return model


def without(*names):
    return lambda tensors: {key: value for key, value in tensors.items() if key not in names}


@pytest.mark.parametrize("model_type", PLAIN + CONVERTED)
def test_every_rank_holds_its_part_of_what_from_pretrained_loads(tmp_path, model_type):
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    full = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for coordinate in [(0, 0), (0, 2), (1, 1)]:
        meta = on_meta(model)
        targets = targets_of(meta, (2, 3), coordinate)
        report = load_into(meta, targets, tmp_path)
        assert_holds(targets, full)
        assert report.missing_keys == report.unexpected_keys == ()


def test_the_dtype_of_the_model_wins_over_the_checkpoint(tmp_path):
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    meta = on_meta(model, torch.bfloat16)
    targets = targets_of(meta, *LAST)
    load_into(meta, targets, tmp_path)
    assert_holds(targets, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict())


def test_bytes_read_are_those_of_the_ranks_rows(llama, tmp_path):
    meta = on_meta(llama)
    targets = targets_of(meta, (3, 1), (1, 0))
    assert load_into(meta, targets, tmp_path).bytes_read == sum(target.tensor.nbytes for target in targets)


def test_loading_leaves_the_model_alone(llama, tmp_path):
    meta = on_meta(llama)
    before = {name: id(tensor) for name, tensor in meta.state_dict(keep_vars=True).items()}
    load_into(meta, targets_of(meta), tmp_path)
    assert {name: id(tensor) for name, tensor in meta.state_dict(keep_vars=True).items()} == before
    assert all(parameter.is_meta for parameter in meta.parameters())


def test_the_default_device_of_the_caller_does_not_matter(tmp_path):
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path, without("model.norm.weight"))
    meta = on_meta(model)
    targets = targets_of(meta, *LAST)
    with torch.device("meta"):
        load_into(meta, targets, tmp_path, strict=False)
    assert_holds(targets, model.state_dict() | {"model.norm.weight": torch.ones(32)})


def test_every_shape_mismatch_is_listed_before_a_byte_is_written(llama, tmp_path):
    # One vocabulary row more, which chunking would hide on most ranks, and a transposed matrix.
    def change(tensors):
        tensors["lm_head.weight"] = torch.cat([tensors["lm_head.weight"], torch.zeros(1, 32)])
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].T.contiguous()
        return tensors

    rewrite(tmp_path, change)
    meta = on_meta(llama)
    targets = targets_of(meta, (2, 3), (0, 1))
    for target in targets:
        target.tensor.fill_(7)
    with pytest.raises(CheckpointError) as error:
        load_into(meta, targets, tmp_path)
    assert "lm_head.weight: checkpoint (68, 32), model (67, 32)" in str(error.value)
    assert "model.layers.1.mlp.up_proj.weight: checkpoint (32, 48), model (48, 32)" in str(error.value)
    assert "in model.safetensors" in str(error.value)
    assert all((target.tensor == 7).all() for target in targets)


def test_integers_for_a_float_parameter_are_refused(llama, tmp_path):
    rewrite(tmp_path, lambda tensors: tensors | {"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    meta = on_meta(llama)
    with pytest.raises(CheckpointError, match=r"model.norm.weight: checkpoint torch.int8, model torch.float32"):
        load_into(meta, targets_of(meta), tmp_path)


def test_a_quantized_checkpoint_is_refused(llama, tmp_path):
    llama.config.quantization_config = {"quant_method": "fp8"}
    llama.config.save_pretrained(tmp_path)
    del llama.config.quantization_config
    meta = on_meta(llama)
    with pytest.raises(CheckpointError, match="quantized checkpoints cannot be loaded"):
        load_into(meta, targets_of(meta), tmp_path)


def test_two_keys_for_one_tensor_are_refused(llama, tmp_path):
    rewrite(tmp_path, lambda tensors: tensors | {"norm.weight": torch.ones(32)})
    meta = on_meta(llama)
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' and 'norm.weight' .* both name model.norm.weight"):
        load_into(meta, targets_of(meta), tmp_path)


def test_targets_that_leave_out_a_saved_buffer_are_refused(tmp_path):
    model = tiny_model("deepseek_v3")
    model.save_pretrained(tmp_path)
    meta = on_meta(model)
    parameters = dict(meta.named_parameters())
    targets = [target for target in targets_of(meta) if target.fqn in parameters]
    with pytest.raises(ValueError, match=r"no target for .*: model.layers.1.mlp.gate.e_score_correction_bias$"):
        load_into(meta, targets, tmp_path)


@pytest.mark.parametrize("model_type", ["apertus", "deepseek_v3"])
def test_buffer_targets_load_every_saved_buffer_whole(tmp_path, model_type):
    model = tiny_model(model_type)
    for buffer in model.buffers():
        buffer.add_(0.25)
    model.save_pretrained(tmp_path)
    meta = on_meta(model)
    parameters = dict(meta.named_parameters())
    materialize_buffers(meta, "cpu")
    buffers = buffer_targets(meta, (2, 3), (1, 2))
    others = [target for target in targets_of(meta, *LAST) if target.fqn in parameters]
    load_into(meta, others + buffers, tmp_path)
    assert buffers
    for target in buffers:
        assert torch.equal(meta.get_buffer(target.fqn), model.get_buffer(target.fqn))


@pytest.mark.parametrize("lost", ["w1", "w2", "all"])
def test_a_missing_expert_is_an_error(tmp_path, lost):
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    mark = "layers.0.block_sparse_moe.experts.1." + ("" if lost == "all" else lost)
    rewrite(tmp_path, lambda tensors: {key: value for key, value in tensors.items() if mark not in key})
    meta = on_meta(model)
    with pytest.raises(CheckpointError, match=r"model.layers.0.mlp.experts"):
        load_into(meta, targets_of(meta, *LAST), tmp_path)


def test_an_expert_of_another_shape_is_an_error(tmp_path):
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    key = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    rewrite(tmp_path, lambda tensors: tensors | {key: torch.zeros(3, 3)})
    meta = on_meta(model)
    with pytest.raises(CheckpointError, match=r"model.layers.0.mlp.experts.down_proj cannot be made of"):
        load_into(meta, targets_of(meta), tmp_path)


@pytest.mark.parametrize("model_type", CONVERTED)
def test_converted_keys_are_read_in_the_ranks_own_bytes(tmp_path, model_type):
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path)
    meta = on_meta(model)
    read = [load_into(meta, targets := targets_of(meta, (2, 1), (0, 0)), tmp_path).bytes_read]
    assert read == [sum(target.tensor.nbytes for target in targets)]


def test_an_expert_that_is_missing_is_named(tmp_path):
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    lost = "model.layers.1.mlp.experts.3.up_proj.weight"
    rewrite(tmp_path, without(lost))
    meta = on_meta(model)
    with pytest.raises(CheckpointError, match=rf"layers.1.mlp.experts.gate_up_proj .* lacks {lost}"):
        load_into(meta, targets_of(meta, *LAST), tmp_path)


def test_a_rank_without_experts_reads_none(tmp_path):
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    meta = on_meta(model)
    targets = targets_of(meta, (5, 1), (4, 0))
    experts = [target for target in targets if ".experts." in target.fqn]
    assert all(target.tensor.numel() == 0 for target in experts)
    assert load_into(meta, targets, tmp_path).bytes_read == sum(target.tensor.nbytes for target in targets)


def test_experts_stored_both_merged_and_apart_are_refused(tmp_path):
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    rewrite(tmp_path, lambda tensors: tensors | {name: model.state_dict()[name].clone()})
    meta = on_meta(model)
    with pytest.raises(CheckpointError, match=r"both name model.layers.0.mlp.experts.down_proj"):
        load_into(meta, targets_of(meta), tmp_path)


def test_progress_is_quiet_when_stderr_is_no_terminal(llama, tmp_path, capsys):
    meta = on_meta(llama)
    load_into(meta, targets_of(meta), tmp_path, progress=True)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_progress_shows_bytes_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with transfer_progress("Loading weights", 2_000_000, enabled=True) as advance:
        advance(2_000_000)
    assert "2.0/2.0 MB" in capsys.readouterr().err
