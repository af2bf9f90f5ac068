"""Optional reading: how whatever reads a parameter is made to wait for it, and nothing else is."""

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class Arriving(nn.Parameter):
    """A parameter whose new value is on its way. Whatever reads it waits for it: any function of torch, in
    any module's forward or outside of all, since all of them ask an argument of a class of its own first.

    A parameter is of this class from the end of a step until it is read. What only asks for its shape
    or the like does not wait. An alias made before (`w = p.data`) is not watched.
    """

    arrives_in: "FlatBucket"  # noqa: F821

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for t in tree_leaves((args, kwargs)):
            if type(t) is Arriving:
                t.arrives_in.receive_parameters()
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo):
        return self._arrived().__deepcopy__(memo)

    def __reduce_ex__(self, protocol):
        return self._arrived().__reduce_ex__(protocol)

    def _arrived(self) -> nn.Parameter:
        self.arrives_in.receive_parameters()
        return self


METADATA = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "is_cuda",
        "is_cpu",
        "is_sparse",
        "is_leaf",
        "is_meta",
        "requires_grad",
        "grad",
        "grad_fn",
        "itemsize",
        "nbytes",
    )
} | {
    getattr(torch.Tensor, name)
    for name in (
        "size",
        "stride",
        "dim",
        "numel",
        "element_size",
        "nelement",
        "is_floating_point",
        "is_complex",
        "untyped_storage",
        "data_ptr",
        "is_contiguous",
        "storage_offset",
    )
}


def is_compiled(model: nn.Module) -> bool:
    return any(
        isinstance(m, torch._dynamo.OptimizedModule) or m._compiled_call_impl is not None
        for m in model.modules()
    )
