"""What a compiled model, or compile itself, refuses: one sentence each, that names the thing and the remedy."""

import copy
import pickle

import accelerate
import models
import pytest
import torch
import transformers
from transformers.distributed import DistributedConfig

import ndcompile
from ndcompile.errors import MeshError, NdcompileError, UnsupportedError

ONE = {"num_hidden_layers": 1}


@pytest.fixture(scope="module")
def model():
    return ndcompile.compile(models.build("llama", **ONE), backend="aot_eager")


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("push_to_hub", ["me/model"], r"would upload from every rank\. Call save_pretrained\(folder\) on all ranks"),
        ("resize_token_embeddings", [140], r"changes parameters\. Resize.*, then call ndcompile\.compile"),
        ("add_adapter", [None], r"adds parameters\. Add.*, then call ndcompile\.compile"),
    ],
)
def test_a_method_that_cannot_work_says_so(model, name, arguments, sentence):
    with pytest.raises(UnsupportedError, match=rf"^{name}\(\).*{sentence}"):
        getattr(model, name)(*arguments)


def test_trainer_refuses_a_compiled_model(model, tmp_path):
    with pytest.raises(UnsupportedError, match=r"^Trainer and accelerator\.prepare\(\) cannot take a compiled model"):
        transformers.Trainer(model=model, args=transformers.TrainingArguments(str(tmp_path), report_to=[]))


def test_accelerate_refuses_a_compiled_model(model):
    forward = model.forward
    with pytest.raises(UnsupportedError, match=r"^Trainer and accelerator\.prepare\(\) cannot take a compiled model"):
        accelerate.Accelerator(cpu=True).prepare(model)
    assert model.forward is forward


def test_deepcopy_raises(model):
    with pytest.raises(UnsupportedError, match=r"cannot be copied or pickled\. Copy the model before"):
        copy.deepcopy(model)


def test_pickle_raises(model):
    with pytest.raises(UnsupportedError, match=r"cannot be copied or pickled.*save its state_dict\(\)"):
        pickle.dumps(model)


def test_compiling_twice_is_refused(model):
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM is compiled already"):
        ndcompile.compile(model)


@pytest.mark.parametrize(
    ("option", "error", "sentence"),
    [
        ({"pp_size": 2}, MeshError, "pp_size=2: pipeline parallelism is not supported"),
    ],
)  # fmt: skip
def test_an_option_that_is_not_implemented_is_refused(option, error, sentence):
    with pytest.raises(error, match=sentence):
        ndcompile.compile(models.on_meta("llama", **ONE), distributed_config=DistributedConfig(**option))


def test_several_ranks_without_a_launcher_name_the_sizes_and_the_command(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    config = DistributedConfig(fsdp_size=2, tp_size=2)
    with pytest.raises(MeshError, match=r"4 ranks \(dp_replicate=1 x fsdp=2 x tp=2\).*torchrun --nproc-per-node 4"):
        ndcompile.compile(models.on_meta("llama", **ONE), distributed_config=config)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_hooks_on_inner_modules_are_refused(kind):
    model = models.on_meta("llama", **ONE)
    getattr(model.model.layers[0].mlp, f"register_{kind}")(lambda *args: None)
    with pytest.raises(UnsupportedError, match=r"Module 'model\.layers\.0\.mlp' has hooks.*hook the top module"):
        ndcompile.compile(model)


def test_an_optimizer_built_before_is_refused():
    model = models.build("llama", **ONE)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UnsupportedError, match="AdamW optimizer was built before"):
        ndcompile.compile(model)
    del optimizer
    ndcompile.compile(model, backend="aot_eager")


def test_an_optimizer_of_another_model_is_none_of_our_business():
    optimizer = torch.optim.SGD(models.build("llama", **ONE).parameters(), lr=1.0)
    ndcompile.compile(models.build("llama", **ONE), backend="aot_eager")
    assert optimizer.param_groups


def test_a_forward_without_weights_says_not_loaded():
    model = ndcompile.compile(models.on_meta("llama", **ONE), backend="aot_eager")
    with pytest.raises(NdcompileError, match=r"Parameter 'model\.embed_tokens\.weight' is not loaded.*ndcompile\.load"):
        model(input_ids=models.token_ids(2, 8))


def test_an_object_that_is_no_module_is_a_type_error():
    with pytest.raises(TypeError, match=r"takes a transformers PreTrainedModel or an nn\.Module, not builtins\.dict"):
        ndcompile.compile({})


def test_an_ordinary_module_without_weights_is_refused():
    with torch.device("meta"):
        module = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=r"Linear is no transformers model: give it real weights before"):
        ndcompile.compile(module)


def test_an_ordinary_module_has_no_checkpoints():
    compiled = ndcompile.compile(torch.nn.Linear(2, 2), backend="aot_eager")
    for call in (lambda: ndcompile.load(compiled, "folder"), lambda: ndcompile.init_weights(compiled, 0)):
        with pytest.raises(UnsupportedError, match=r"save and load its state_dict\(\) with torch\.distributed"):
            call()


def test_a_model_behind_torch_compile_is_refused():
    with pytest.raises(UnsupportedError, match=r"wrapped in OptimizedModule\. Pass the plain"):
        ndcompile.compile(torch.compile(models.on_meta("llama", **ONE)))


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, torch.compile], ids=["DataParallel", "OptimizedModule"])
def test_a_wrapper_is_refused_wherever_it_is(wrap, request):
    kind = request.node.callspec.id
    with pytest.raises(UnsupportedError, match=f"The model is wrapped in {kind}"):
        ndcompile.compile(wrap(models.build("llama", **ONE)))
    model = models.build("llama", **ONE)
    model.model = wrap(model.model)
    with pytest.raises(UnsupportedError, match=f"Module 'model' is wrapped in {kind}"):
        ndcompile.compile(model)


def test_a_model_that_accelerate_prepared_is_refused():
    accelerate.state.AcceleratorState._reset_state(True)
    try:
        model = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(models.build("llama", **ONE))
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
    with pytest.raises(UnsupportedError, match=r"'LlamaForCausalLM' was replaced by accelerator\.prepare\(\)"):
        ndcompile.compile(model)


def test_a_dispatched_model_is_refused():
    model = accelerate.dispatch_model(models.build("llama", **ONE), {"": "cpu"}, force_hooks=True)
    with pytest.raises(UnsupportedError, match=r"carries accelerate hooks \(device_map"):
        ndcompile.compile(model)


def test_a_quantized_model_is_refused():
    model = models.on_meta("llama", **ONE)
    model.hf_quantizer = object()
    with pytest.raises(UnsupportedError, match="is quantized, which ndcompile cannot shard yet"):
        ndcompile.compile(model)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"backend": "nvcc"}, "backend 'nvcc' is unknown. Use one of"),
        ({"disable_passes": ["fuse"]}, r"names \['fuse'\], which are no passes. Passes: \['"),
        ({"disable_passes": ["unshard_parameters"]}, "cannot be disabled"),
    ],
)
def test_an_unknown_option_names_the_known_ones(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        ndcompile.compile(models.on_meta("llama", **ONE), **options)
