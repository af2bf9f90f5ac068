"""The gradients of several micro-batches, added up on one rank before the ranks exchange anything."""

from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from zero1_helpers.hooks import on_gradients


class GradientSum:
    """Adds up the gradients of a step's micro-batches, in the parameters' dtype or in float32.

    ::

        gradient_sum = GradientSum(model, in_float32=True)    # before the model is wrapped
        wrapper = SimpleDDPBucket(model)
        for i, batch in enumerate(micro_batches):
            with gradient_sum.micro_batch(wrapper, last=i == len(micro_batches) - 1):
                wrapper(**batch).loss.backward()

    A wrapper communicates behind the last backward only, under `no_sync()` before. Every addition in bf16
    rounds to 8 bits, so after 64 micro-batches about half a per cent is lost. In float32 the sum is rounded
    once, to the parameter's dtype; until then it takes 4 bytes for each element (`main_grad` in Megatron-LM).
    The hooks that do so are older than the wrapper's and run first. So a wrapper meets a gradient in the last
    micro-batch only, and that gradient is the sum.
    """

    def __init__(self, model: nn.Module, in_float32: bool = False):
        self._sums: dict[Tensor, Tensor] = {}
        self._last = False
        params = [p for p in model.parameters() if p.requires_grad] if in_float32 else []
        self._hooks = on_gradients(params, self._add)

    @torch.no_grad()
    def _add(self, p: Tensor) -> None:
        total = self._sums.pop(p).add_(p.grad) if p in self._sums else p.grad.float()
        if self._last:
            p.grad = total.to(p.dtype)
        else:
            self._sums[p], p.grad = total, None

    @contextmanager
    def micro_batch(self, wrapper: nn.Module, last: bool):
        """Around forward and backward of one micro-batch; in the last one the wrapper may communicate."""
        self._last = last
        holds_back = not last and hasattr(wrapper, "no_sync")
        with wrapper.no_sync() if holds_back else nullcontext():
            yield
        while last and self._sums:  # of parameters that the last micro-batch did not use
            p, total = self._sums.popitem()
            p.grad = total.to(p.dtype)

    def remove(self) -> None:
        """Leave no hook on the model."""
        for hook in self._hooks:
            hook.remove()
