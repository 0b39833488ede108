"""Calls of a compiled model in one process, against the same call of the plain model."""

import copy

import models
import pytest
import torch
from matrix import sampled
from transformers import T5Config, T5ForConditionalGeneration

import ndcompile
from ndcompile.errors import CaptureError, UnsupportedError
from ndcompile.model_calls import compiled_model

IDS, LABELS = models.token_ids(2, 8), models.token_ids(2, 8, seed=1)
LABELS[0, :3] = -100
ONE = {"num_hidden_layers": 1}


@pytest.fixture(scope="module")
def plain():
    return models.build("llama", **ONE).eval()


@pytest.fixture(scope="module")
def model():
    return ndcompile.compile(models.build("llama", **ONE).eval(), backend="aot_eager")


def assert_same(actual, expected):
    assert list(actual) == list(expected)
    torch.testing.assert_close(dict(actual), dict(expected), rtol=1e-5, atol=1e-6)


MASK = torch.ones_like(IDS)
MASK[0, :5] = 0
PACKED = torch.cat([torch.arange(3), torch.arange(5)]).expand(1, 8).contiguous()
CALLS = {
    "labels": {"input_ids": IDS, "labels": LABELS},
    "labels=None": {"input_ids": IDS, "labels": None},
    "padding mask": {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS},
    "position_ids": {"input_ids": IDS[:1], "position_ids": torch.arange(2, 10).view(1, 8)},
    "packed position_ids": {"input_ids": IDS[:1], "position_ids": PACKED},
    "output_hidden_states": {"input_ids": IDS, "output_hidden_states": True},
    "logits_to_keep": {"input_ids": IDS, "logits_to_keep": 3},
    "logits_to_keep of labels": {"input_ids": IDS, "labels": LABELS, "logits_to_keep": 8},
    "num_items_in_batch": {"input_ids": IDS, "labels": LABELS, "num_items_in_batch": 40},
    "use_cache=False": {"input_ids": IDS, "use_cache": False},
    "inputs_embeds": {"inputs_embeds": torch.linspace(-1, 1, 2 * 8 * 64).sin().view(2, 8, 64)},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_call_gives_what_the_plain_model_gives(call, model, plain):
    with torch.no_grad():
        assert_same(model(**call), plain(**{"use_cache": False} | call))


def test_packed_sequences_do_not_see_each_other(model, plain):
    """The second sequence of a pack gives what it gives alone."""
    with torch.no_grad():
        packed = model(input_ids=IDS[:1], position_ids=PACKED).logits[:, 3:]
        alone = plain(input_ids=IDS[:1, 3:]).logits
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)


def test_return_dict_false_gives_a_tuple(model, plain):
    with torch.no_grad():
        actual = model(input_ids=IDS, labels=LABELS, return_dict=False)
        expected = plain(input_ids=IDS, labels=LABELS, return_dict=False, use_cache=False)
    assert isinstance(actual, tuple)
    torch.testing.assert_close(actual, expected)


def test_output_attentions_with_eager_attention():
    plain = models.build("llama", **ONE, attn_implementation="eager").eval()
    model = ndcompile.compile(models.build("llama", **ONE, attn_implementation="eager").eval(), backend="aot_eager")
    with torch.no_grad():
        actual, expected = (m(input_ids=IDS, output_attentions=True) for m in (model, plain))
    assert expected.attentions[0].shape == (2, 4, 8, 8)
    torch.testing.assert_close(actual.attentions, expected.attentions)


def test_inference_mode(model, plain):
    with torch.inference_mode():
        output = model(input_ids=IDS)
        torch.testing.assert_close(output.logits, plain(input_ids=IDS).logits)
    assert output.logits.is_inference()


def test_use_cache_unset_is_off(model):
    with torch.no_grad():
        assert model(input_ids=IDS).cache is None


def test_use_cache_unset_is_off_in_stacks_with_configs_of_their_own():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 100}
    torch.manual_seed(0)
    plain = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)).train()
    call = {"input_ids": IDS % 100, "labels": IDS[:, :5] % 100}
    output = ndcompile.compile(copy.deepcopy(plain), backend="aot_eager")(**call)
    assert_same(output, plain(**call, use_cache=False))
    assert plain.decoder.config.use_cache  # the model's own is as it was


def test_use_cache_returns_a_cache_that_the_next_call_takes(model):
    with torch.no_grad():
        first = model(input_ids=IDS[:, :-1], use_cache=True)
        second = model(input_ids=IDS[:, -1:], cache=first.cache)
        whole = model(input_ids=IDS)
    assert second.cache is first.cache
    assert second.cache.get_seq_length() == IDS.shape[1]
    torch.testing.assert_close(second.logits[:, -1], whole.logits[:, -1])


def test_the_same_signature_captures_once(model):
    with torch.no_grad():
        model(input_ids=IDS)
        signatures = len(compiled_model(model).signatures)
        model(input_ids=models.token_ids(2, 8, seed=5))
    assert len(compiled_model(model).signatures) == signatures


def test_a_user_loss_on_the_logits_gives_the_gradients_of_the_plain_model():
    plain, model = models.build("llama", **ONE), models.build("llama", **ONE)
    ndcompile.compile(model, backend="aot_eager")
    for each in (plain, model):
        (each(input_ids=IDS).logits.float().softmax(-1) ** 2).sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.to_local(), parameter.grad, rtol=1e-4, atol=1e-6)


def test_gradients_reach_inputs_embeds():
    plain, model = models.build("llama", **ONE), models.build("llama", **ONE)
    ndcompile.compile(model, backend="aot_eager")
    gradients = []
    for each in (plain, model):
        embeddings = CALLS["inputs_embeds"]["inputs_embeds"].clone().requires_grad_()
        each(inputs_embeds=embeddings, labels=LABELS).loss.backward()
        gradients.append(embeddings.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["model", "model.layers.0", "model.layers.0.self_attn.q_proj"])
def test_calling_an_inner_module_names_it(model, name):
    with pytest.raises(UnsupportedError, match=rf"'{name}' is part of a compiled LlamaForCausalLM"):
        model.get_submodule(name)(IDS)


def test_data_dependent_control_flow_names_its_source_line():
    class Branching(type(models.build("llama", **ONE))):
        def forward(self, input_ids=None, **kwargs):
            output = super().forward(input_ids=input_ids, **kwargs)
            if output.logits.sum() > 0:  # this line
                return output
            return output

    model = ndcompile.compile(Branching(models.config("llama", **ONE)), backend="aot_eager")
    with pytest.raises(CaptureError) as error, torch.no_grad():
        model(input_ids=IDS)
    assert "Branching could not be captured as one graph" in str(error.value)
    assert "if output.logits.sum() > 0:  # this line" in str(error.value)
    assert __file__ in str(error.value)


def test_empty_input_is_refused(model):
    with pytest.raises(ValueError, match="Empty input: batch 0, sequence length 8"):
        model(input_ids=IDS[:0])


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_autocast_is_honoured_and_the_backward_may_run_under_it(backend):
    """Not recommended by torch, but what scripts do."""
    plain, model = models.build("llama", **ONE), models.build("llama", **ONE)
    ndcompile.compile(model, backend=backend)
    for each in (plain, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = each(input_ids=IDS, labels=LABELS)
            assert output.logits.dtype == torch.bfloat16
            output.loss.backward()
    gradient = plain.lm_head.weight.grad
    error = (model.lm_head.weight.grad.to_local() - gradient).abs().max() / gradient.abs().max()
    assert error < 0.02


class _ConvertsWithoutGradients(torch.nn.Module):
    """A part that is no part of the gradient converts its input to the dtype that it has."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x)
        with torch.no_grad():
            scale = hidden.to(self.first.weight.dtype).abs().mean()
        return self.second(hidden).sum() * scale


def test_gradients_flow_past_a_conversion_in_a_no_grad_region():
    torch.manual_seed(0)
    plain, x = _ConvertsWithoutGradients(), torch.randn(2, 4)
    model = ndcompile.compile(copy.deepcopy(plain), backend="eager")
    plain(x).backward()
    model(x).backward()
    torch.testing.assert_close(model.first.weight.grad.full_tensor(), plain.first.weight.grad)


class _RotatesWholeHeads(torch.nn.Module):
    """Rotates all of a head's channels and appends the rest, which is empty (GPT-NeoX with rotary_pct 1)."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 8)

    def forward(self, x):
        heads = self.project(x).transpose(1, 2)
        return torch.cat((heads[..., :8].cos(), heads[..., 8:]), -1).view(-1, 4, 8).sum()


@pytest.mark.parametrize("backend", sampled(["aot_eager", "inductor"], 0))
def test_joining_with_nothing_gives_a_contiguous_tensor(backend):
    plain, x = _RotatesWholeHeads(), torch.randn(2, 4, 3, 8)
    torch.testing.assert_close(ndcompile.compile(copy.deepcopy(plain), backend=backend)(x), plain(x))
