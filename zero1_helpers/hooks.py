"""Hooks on gradients that keep nothing alive."""

import weakref
from collections.abc import Callable, Iterable

from torch import Tensor
from torch.utils.hooks import RemovableHandle


def on_gradients(params: Iterable[Tensor], method: Callable) -> list[RemovableHandle]:
    """Call a bound method with each of these parameters when its gradient is complete.

    torch keeps a hook where the garbage collector does not look, so a hook that held its object would hold
    the model for ever. This one calls its object as long as somebody else holds it.
    """
    weak = weakref.WeakMethod(method)

    def hook(param: Tensor) -> None:
        if called := weak():
            called(param)

    return [p.register_post_accumulate_grad_hook(hook) for p in params]
