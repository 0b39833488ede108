"""A module as one operator of torch: what it does inside is not traced, its gradient is computed by running it again.

Two operators of a name of their own stand for a module, for one way to call it:

    opaque_3(seed, salt, tensors) -> outputs
    opaque_3_backward(seed, salt, gradients, tensors, needed) -> gradients of the tensors that need one

tensors are the module's inputs, parameters and buffers. The module is a copy without weights, whose own forward runs
on them. Nothing of it stays behind a call: random numbers come from a seed, and what it writes into its tensors is an
error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ndcompile.errors import NdcompileError, UnsupportedError
from ndcompile.operators.random_ops import stream_seed
from ndcompile.private.tracing import FakeTensorMode, HintedShapes, as_called_from_python, outside_of_tracing

_numbers = itertools.count()
"""Operators of torch are known by name in all of a process."""

HINTS = (1, 0, 2)
"""What sizes and numbers that depend on values are taken to be, where only the shapes of outputs are asked for."""

PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class Placed:
    """What an output is, at every call. dtype None: no tensor, but `constant`."""

    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    constant: Any = None


@dataclass(frozen=True)
class Signature:
    """One way to call a module.

    spec, constants: of its arguments; None stands for a tensor in `constants`. parameters: names of each, of which ties
    have several. autocast: device, dtype and whether it is on, as where the module was captured. alike: all ranks of a
    tp group run it on the same values, and must get the same bits.
    """

    spec: pytree.TreeSpec
    constants: tuple[Any, ...]
    parameters: tuple[tuple[str, ...], ...]
    buffers: tuple[str, ...]
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    alike: bool


TENSOR = "a tensor"


class OutputUnknown(UnsupportedError):
    """What a module returns is not known before it runs."""


class OpaqueOperator:
    """`module`: without weights; this object owns it. `inputs`: fake or real tensors, for their shapes."""

    def __init__(self, fqn: str, module: nn.Module, signature: Signature, tensors: Sequence[Tensor]) -> None:
        self.fqn, self.module, self.signature = fqn, module, signature
        self.output_spec, self.outputs = self._outputs_of(tensors)
        name = f"opaque_{next(_numbers)}"
        self.library = torch.library.Library("ndcompile", "FRAGMENT")
        self.library.define(f"{name}(Tensor? seed, int salt, Tensor[] tensors) -> Tensor[]")
        self.library.define(
            f"{name}_backward(Tensor? seed, int salt, Tensor[] gradients, Tensor[] tensors, bool[] needed) -> Tensor[]"
        )
        self.library.impl(name, self._run, "CompositeExplicitAutograd")
        self.library.impl(f"{name}_backward", self._differentiate, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ndcompile::{name}", self._fake, lib=self.library)
        torch.library.register_fake(f"ndcompile::{name}_backward", _like_tensors, lib=self.library)
        torch.library.register_autograd(
            f"ndcompile::{name}", self._backward, setup_context=_keep_inputs, lib=self.library
        )
        self.operator: Any = getattr(torch.ops.ndcompile, name).default
        self.backward_operator: Any = getattr(torch.ops.ndcompile, f"{name}_backward").default

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """The module's output, as a node of a trace. Where random numbers come from is added by `seed_random_ops`."""
        made = iter(self.operator(None, 0, list(tensors)))
        leaves = [next(made) if placed.dtype is not None else placed.constant for placed in self.outputs]
        return pytree.tree_unflatten(leaves, self.output_spec)

    def _fake(self, seed: Tensor | None, salt: int, tensors: list[Tensor]) -> list[Tensor]:
        made = [placed for placed in self.outputs if placed.dtype is not None]
        return [torch.empty(placed.shape, dtype=placed.dtype, device=placed.device) for placed in made]

    def _run(self, seed: Tensor | None, salt: int, tensors: list[Tensor]) -> list[Tensor]:
        with self._surroundings(seed, salt, tensors), torch.no_grad():
            outputs = self._call([tensor.detach() for tensor in tensors])
        memory = {tensor.untyped_storage()._cdata for tensor in tensors}
        found: list[Tensor] = []
        for output in outputs:  # an operator returns memory of its own
            shared = output.untyped_storage()._cdata in memory
            found.append(output.clone(memory_format=torch.contiguous_format) if shared else output.contiguous())
            memory.add(found[-1].untyped_storage()._cdata)
        return found

    def _differentiate(
        self, seed: Tensor | None, salt: int, gradients: list[Tensor], tensors: list[Tensor], needed: list[bool]
    ) -> list[Tensor]:
        """Run again, and take what arrives at leaves of the graph: an autograd Function that fills gradients of
        parameters by itself does so there."""
        with self._surroundings(seed, salt, tensors), torch.enable_grad():
            leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, needed, strict=True)]
            outputs = [output for output in self._call(leaves) if output.dtype.is_floating_point]
            pairs = [(out, grad) for out, grad in zip(outputs, gradients, strict=True) if out.requires_grad]
            if pairs:
                torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        wanted = [leaf for leaf, need in zip(leaves, needed, strict=True) if need]
        return [torch.zeros_like(w) if w.grad is None else w.grad.contiguous() for w in wanted]

    def _backward(self, ctx: Any, gradients: list[Tensor | None]) -> Any:
        seed, *tensors = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[2])
        made = [placed for placed in self.outputs if placed.dtype is not None]
        given = [
            torch.zeros(placed.shape, dtype=placed.dtype, device=placed.device) if gradient is None else gradient
            for placed, gradient in zip(made, gradients, strict=True)
            if placed.dtype.is_floating_point  # type: ignore[union-attr]
        ]
        found = iter(self.backward_operator(seed, ctx.salt, given, tensors, needed))
        return None, None, [next(found) if need else None for need in needed]

    def _call(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of the module's output. Raises NdcompileError for what it was not traced with."""
        versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
        spec, leaves = self._flat_output(tensors)
        if any(version is not None and t._version != version for t, version in zip(tensors, versions, strict=True)):
            raise NdcompileError(f"{self.fqn!r} runs as one opaque node, but writes to its inputs or its own tensors.")
        found = [_placed(leaf) for leaf in leaves]
        if spec != self.output_spec or found != list(self.outputs):
            raise NdcompileError(
                f"{self.fqn!r} runs as one opaque node that returned {_spell(self.outputs)} when it was traced, but "
                f"returns {_spell(found)} now: what it returns depends on values."
            )
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _flat_output(self, tensors: Sequence[Tensor]) -> tuple[pytree.TreeSpec, list[Any]]:
        signature, given = self.signature, iter(tensors)
        arguments = [next(given) if constant is TENSOR else constant for constant in signature.constants]
        args, kwargs = pytree.tree_unflatten(arguments, signature.spec)
        with self._holding(given) as held:
            output = self.module(*args, **kwargs)
            if any(owner._buffers[attribute] is not tensor for owner, attribute, tensor in held):
                raise NdcompileError(f"{self.fqn!r} runs as one opaque node, but replaces its own buffers.")
        leaves, spec = pytree.tree_flatten(output)
        return spec, leaves

    @contextmanager
    def _holding(self, tensors: Iterator[Tensor]) -> Iterator[list[tuple[nn.Module, str, Tensor]]]:
        """The module with its parameters and buffers, until the next call: a backward may run parts of it again."""
        held = []
        for names in self.signature.parameters:
            tensor = next(tensors)
            for owner, attribute in map(self._place, names):
                owner._parameters[attribute] = tensor  # type: ignore[assignment]
        for name in self.signature.buffers:
            owner, attribute = self._place(name)
            owner._buffers[attribute] = tensor = next(tensors)
            held.append((owner, attribute, tensor))
        yield held

    def _place(self, name: str) -> tuple[nn.Module, str]:
        owner, _, attribute = name.rpartition(".")
        return self.module.get_submodule(owner), attribute

    @contextmanager
    def _surroundings(self, seed: Tensor | None, salt: int, tensors: Sequence[Tensor]) -> Iterator[None]:
        """As at the module's place in eager mode, but for random numbers, of which the call has its own."""
        devices = sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})
        deterministic = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        with ExitStack() as stack:
            stack.enter_context(as_called_from_python())
            for device, dtype, enabled in self.signature.autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled))
            stack.enter_context(torch.random.fork_rng(devices))
            if seed is not None:
                torch.manual_seed(stream_seed(int(seed), salt))
            if self.signature.alike and not deterministic:
                stack.callback(torch.use_deterministic_algorithms, deterministic, warn_only=warn_only)
                torch.use_deterministic_algorithms(True, warn_only=True)
            yield

    def _outputs_of(self, tensors: Sequence[Tensor]) -> tuple[pytree.TreeSpec, tuple[Placed, ...]]:
        """What the module returns, from a run on fake tensors that goes one of the ways that it may go; where none can
        be gone with sizes that are made up, from two runs on random numbers.

        Raises OutputUnknown where a size of it depends on values.
        """
        sizes = [([int(size) for size in tensor.shape], tensor.dtype, tensor.device) for tensor in tensors]
        failed: Exception | None = None
        for hint in (*HINTS, None):
            try:
                found = [self._returned(sizes, hint, seed) for seed in ((0, 1) if hint is None else (0,))]
            except OutputUnknown as error:
                raise OutputUnknown(f"{self.fqn!r} cannot run as one opaque node: {error}") from error
            except Exception as error:  # of the model's code, on the way that it went
                failed = error
                continue
            if any(other != found[0] for other in found):
                raise OutputUnknown(f"{self.fqn!r} cannot run as one opaque node: what it returns depends on values.")
            return found[0]
        raise OutputUnknown(
            f"{self.fqn!r} cannot run as one opaque node: what it returns is not known before it runs "
            f"({type(failed).__name__}: {str(failed).strip().splitlines()[0]})."
        ) from failed

    def _returned(
        self, sizes: Sequence[tuple[list[int], torch.dtype, torch.device]], hint: int | None, seed: int
    ) -> tuple[pytree.TreeSpec, tuple[Placed, ...]]:
        """Structure and kinds of the output: on fake tensors with a hint, on real ones without."""
        fake = nullcontext() if hint is None else FakeTensorMode(shape_env=HintedShapes(hint))
        with outside_of_tracing(), ExitStack() as stack:
            stack.enter_context(fake)
            tensors = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in sizes]
            stack.enter_context(self._surroundings(None, 0, tensors))
            stack.enter_context(torch.no_grad())
            if hint is None:
                generator = torch.Generator().manual_seed(seed)
                for tensor in tensors:
                    if tensor.dtype.is_floating_point:
                        tensor.copy_(torch.randn(tensor.shape, generator=generator))
            spec, leaves = self._flat_output(tensors)
        return spec, tuple(_placed(leaf) for leaf in leaves)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    seed, ctx.salt, tensors = inputs
    ctx.save_for_backward(seed, *tensors)


def _like_tensors(
    seed: Tensor | None, salt: int, gradients: list[Tensor], tensors: list[Tensor], needed: list[bool]
) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor, need in zip(tensors, needed, strict=True) if need]


def _placed(leaf: Any) -> Placed:
    """Raises OutputUnknown for an output whose sizes depend on values, and for one that is no plain value."""
    if not isinstance(leaf, Tensor):
        if not isinstance(leaf, PLAIN):
            raise OutputUnknown(f"it returns a {type(leaf).__name__}.")
        return Placed(constant=leaf)
    sizes: list[Any] = list(leaf.shape)
    if any(isinstance(size, torch.SymInt) and size.node.expr.free_symbols for size in sizes):
        raise OutputUnknown(f"it returns a tensor of shape {tuple(leaf.shape)}, which depends on values.")
    return Placed(tuple(int(size) for size in leaf.shape), leaf.dtype, leaf.device)


def _spell(outputs: Sequence[Placed]) -> str:
    return ", ".join(str(o.constant) if o.dtype is None else f"{o.dtype} {list(o.shape)}" for o in outputs)
