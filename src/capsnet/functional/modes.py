"""What PyTorch is up to while an operation runs: tracing, many gradients at once, autocast."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TypeVar

import torch
from torch import Tensor

Context = TypeVar("Context")
Gradients = TypeVar("Gradients")


def is_traced() -> bool:
    """Returns whether someone records or transforms the operations, so that it is no plain run.

    Compilation and export do, the transforms of `torch.func`, derivatives in forward mode, and
    tensors without numbers, by which memory and work are foretold.

    >>> is_traced()
    False
    """
    return (
        torch.compiler.is_compiling()
        or torch.onnx.is_in_onnx_export()
        or bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    )


def is_batched(gradient: Tensor) -> bool:
    """Returns whether it is many gradients at once, as `jacobian(vectorize=True)` sends them."""
    return bool(
        torch._C._functorch.is_batchedtensor(gradient)
        or torch._C._functorch.is_legacy_batchedtensor(gradient)
    )


def full_precision(device: str) -> AbstractContextManager[object]:
    """Autocast off, where a device has it: "meta" has not."""
    if torch.amp.is_autocast_available(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def in_full_precision(
    backward: Callable[[Context, Tensor], Gradients],
) -> Callable[[Context, Tensor], Gradients]:
    """A Function's backward with autocast off, as it was in its forward."""

    @wraps(backward)
    def run(ctx: Context, gradient: Tensor) -> Gradients:
        with full_precision(gradient.device.type):
            return backward(ctx, gradient)

    return run
