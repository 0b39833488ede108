"""`loss_only` of `ndcompile.compile`: calls with labels return the loss and no logits, so that these need not exist."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from transformers.utils import ModelOutput

from ndcompile.errors import UnsupportedError

SENTENCE = (
    "The model was compiled with loss_only=True, so a call with labels computes no logits. Call it without labels, or "
    "compile it without loss_only."
)


def drop_logits(shadow: nn.Module) -> None:
    """Make the forward of the traced copy leave the logits out of an output that has a loss."""
    forward = shadow.forward

    @functools.wraps(forward)
    def without_logits(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if isinstance(output, tuple) and not isinstance(output, ModelOutput):
            raise UnsupportedError("loss_only=True needs outputs with names: leave return_dict on.")
        if output.get("loss") is None:
            return output
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})

    shadow.forward = without_logits


def explain_logits(output: ModelOutput) -> None:
    """Put an object that says why in the place of logits that were left out."""
    if output.get("loss") is not None and "logits" not in output:
        output.__dict__["logits"] = NoLogits()  # an attribute alone: the output has no such key


class NoLogits:
    """Stands for logits that were not computed: every use raises UnsupportedError."""

    def _refuse(self, *_: object, **__: object) -> Any:
        raise UnsupportedError(SENTENCE)

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __array__ = _refuse

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> Any:
        raise UnsupportedError(SENTENCE)

    def __repr__(self) -> str:
        return "NoLogits()"
