"""What a model says of its arguments reaches the user as it is; advice about tp is for those who use it."""

import models
import pytest
import torch

import ndcompile
from ndcompile.errors import CaptureError

ONE = {"num_hidden_layers": 1}
IDS = models.token_ids(2, 8)


@pytest.mark.parametrize("arguments", [{"labels": IDS}, {"input_ids": IDS, "inputs_embeds": torch.zeros(2, 8, 64)}])
def test_neither_or_both_of_ids_and_embeddings(arguments):
    with pytest.raises(ValueError) as expected:
        models.build("llama", **ONE)(**arguments)
    model = ndcompile.compile(models.build("llama", **ONE), backend="eager")
    with pytest.raises(ValueError) as caught:
        model(**arguments)
    assert type(caught.value) is ValueError
    assert str(caught.value) == str(expected.value)
    model(input_ids=IDS)


def test_shapes_that_do_not_fit_get_no_advice_about_tp():
    model = ndcompile.compile(models.build("llama", **ONE), backend="eager")
    with pytest.raises(CaptureError, match="could not be captured as one graph") as caught:
        model(inputs_embeds=torch.zeros(2, 8, 65))
    assert "tp_plan" not in str(caught.value)
