"""The public names, and what compiling a model leaves as it was."""

import copy
import importlib
import importlib.util
import inspect
import pkgutil

import models
import pytest
import torch
import transformers
from transformers.distributed import tensor_parallel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ndcompile

NEED_TRITON = ("ndcompile.copy_engines.lanes", "ndcompile.copy_engines.sums")
"""Which torch has on GPUs alone."""


def test_no_public_name_is_a_submodule():
    names = {name: getattr(ndcompile, name) for name in ndcompile.__all__}
    submodules = [info.name for info in pkgutil.walk_packages(ndcompile.__path__, "ndcompile.")]
    for submodule in submodules:
        if submodule not in NEED_TRITON or importlib.util.find_spec("triton"):
            importlib.import_module(submodule)
    importlib.import_module("ndcompile.passes")
    assert len(submodules) > 20
    assert {name: getattr(ndcompile, name) for name in ndcompile.__all__} == names
    assert not {f"ndcompile.{name}" for name in ndcompile.__all__} & set(submodules)


def test_every_public_function_has_a_docstring():
    assert not [name for name in ndcompile.__all__ if not getattr(ndcompile, name).__doc__]


def test_compile_returns_the_same_object_with_its_class_config_and_names():
    model = models.on_meta("llama", num_hidden_layers=1)
    kind, config, names = type(model), model.config, [name for name, _ in model.named_parameters()]
    assert ndcompile.compile(model, backend="aot_eager") is model
    assert type(model) is kind
    assert model.config is config
    assert [name for name, _ in model.named_parameters()] == names


def state_of(model):
    """Everything of the model and the process that compiling might touch."""
    registries = (tensor_parallel.ALL_PARALLEL_STYLES, ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    return {
        "config": model.config.to_dict(),
        "plans": (model._tp_plan, model._fsdp_plan, model.config.base_model_tp_plan, model._tied_weights_keys),
        "inner forwards": {name for name, module in model.named_modules() if name and "forward" in module.__dict__},
        "registries": [{key: id(registry[key]) for key in registry.keys()} for registry in registries],  # noqa: SIM118
        "masking": transformers.masking_utils.find_packed_sequence_indices,
        "random state": torch.get_rng_state().tolist(),
        "modes": (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


@pytest.fixture(scope="module")
def before_and_after():
    """The state before compile and after a call; the call's logits and those of a plain model, before and after."""
    plain, ids = models.build("llama", num_hidden_layers=1), models.token_ids(2, 8)
    model = models.build("llama", num_hidden_layers=1)
    model.config.use_cache = True
    logits, before = plain(input_ids=ids).logits, copy.deepcopy(state_of(model))
    output = ndcompile.compile(model, backend="aot_eager")(input_ids=ids)
    return before, state_of(model), (output.logits, logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize(
    "part", ["config", "plans", "inner forwards", "registries", "masking", "random state", "modes"]
)
def test_compiling_and_calling_leaves_as_it_was(part, before_and_after):
    before, after, _ = before_and_after
    assert after[part] == before[part]


def test_an_uncompiled_model_of_the_same_class_works_beside_a_compiled_one(before_and_after):
    compiled, before, after = before_and_after[2]
    torch.testing.assert_close(compiled, before)
    assert torch.equal(before, after)


def test_hooks_of_the_top_module_run():
    model = models.build("llama", num_hidden_layers=1).eval()
    seen = []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append("before"), with_kwargs=True)
    ndcompile.compile(model, backend="aot_eager")
    model.register_forward_hook(lambda module, args, output: seen.append(tuple(output.logits.shape)))
    with torch.no_grad():
        model(input_ids=models.token_ids(2, 8))
    assert seen == ["before", (2, 8, 128)]


def test_the_forward_signature_stays():
    model = models.on_meta("llama", num_hidden_layers=1)
    before = inspect.signature(model.forward)
    assert inspect.signature(ndcompile.compile(model).forward) == before


def test_an_argument_that_does_not_exist_raises_as_python_words_it():
    class Strict(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels=None):
            return super().forward(input_ids=input_ids, labels=labels)

    model = ndcompile.compile(Strict(models.config("llama", num_hidden_layers=1)), backend="aot_eager")
    with pytest.raises(TypeError, match="unexpected keyword argument 'lables'"):
        model(input_ids=models.token_ids(2, 8), lables=None)


@pytest.mark.parametrize("function", [ndcompile.data_rank, ndcompile.data_world_size])
def test_asking_a_plain_model_raises(function):
    with pytest.raises(ndcompile.NdcompileError, match="LlamaForCausalLM was not compiled with"):
        function(models.on_meta("llama", num_hidden_layers=1))
