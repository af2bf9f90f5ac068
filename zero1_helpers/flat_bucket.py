"""A flat bucket: parameters laid end to end in one tensor, cut in world_size equal slices.

Gradients come in, this rank steps its slice, and the new weights go around. In layers: `FlatLayout` says
where each parameter lies and what of it is this rank's; `FlatGradients` is the gradients' way to the mean
of the slice; `FlatPieces` what the optimizer steps; `FlatBucket` the weights' way to the other ranks.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero1_helpers import streams
from zero1_helpers.bucket import TakenGradient, dense, settle
from zero1_helpers.collectives import all_gather, reduce_scatter, wait
from zero1_helpers.flat_layout import FlatLayout
from zero1_helpers.lazy_gather import Arriving
from zero1_helpers.memory_math import is_counter
from zero1_helpers.partition import Flat
from zero1_helpers.phases import announce

MASTER = "master_param"  # the entry of a parameter's state that is its copy in more precision


class FlatGradients:
    """The gradients' way, from backward to this rank's slice of their mean.

    One step::

        collect             a gradient moves into `grads`, (world_size * width,), and is free
        send_gradients      launch the reduce-scatter of `grads` into `mine`, (width,)
        receive_gradients   `mine` becomes the mean, in the dtype in which the slice is stepped

    The sum of the ranks' gradients may be too large for their dtype (fp16 ends at 65,504) although the mean
    is not. So each rank divides first: by the power of 2 from world_size upwards, which rounds nothing. What
    is left to divide by, between 1/2 and 1, is divided by after the sum.

    Which parameters got no gradient anywhere? No flags travel. A rank without a gradient sends -0.0,
    since x + -0.0 is x. A rank with a gradient makes sure that the first element of each piece is no -0.0.
    So -0.0 arrives there if no rank had a gradient, and only then.
    """

    def __init__(
        self, params: list[Tensor], index: int, rank: int, world_size: int, partition: Flat
    ):
        self.params, self.index = params, index
        self.layout = FlatLayout.of(params, rank, world_size)
        self.device, self.first_divisor = params[0].device, 2 ** (world_size - 1).bit_length()
        self._heads: Tensor | None = None  # of all pieces of all parameters, as an index
        self.reduced_in = partition.reduced_in(params[0].dtype)
        self.stepped_in = partition.stepped_in(params[0].dtype)
        self.taken: dict[Tensor, TakenGradient] = {}
        self.ready: set[Tensor] = set()  # gradients that backward has delivered
        self.missing: set[Tensor] = set()  # parameters that got no gradient: here, then anywhere
        self.grads: Tensor | None = None
        self.mine: Tensor | None = None
        self.work: dist.Work | None = None  # the reduce-scatter

    @property
    def is_full(self) -> bool:
        return len(self.ready) == len(self.params)

    def collect(self, p: Tensor, name: str) -> None:
        """Take over p.grad. A bucket of one parameter is its gradient, if layout and dtype are the same."""
        if p not in self.taken:
            self.taken[p] = TakenGradient(p, name)
        grad, p.grad = p.grad.detach(), self.taken[p]
        if grad.layout != torch.strided:
            dense(grad, name)  # raises
        alone = (
            grad.shape.numel() == self.layout.shape[0] and grad.stride() == self.layout.views[p][1]
        )
        if alone and grad.dtype == self.reduced_in:
            self.grads = grad.as_strided(self.layout.shape, (1,))
            if self.first_divisor > 1:
                self.grads.mul_(1 / self.first_divisor)
        else:
            self._make_room()
            wide = grad.to(torch.promote_types(grad.dtype, self.reduced_in))
            torch.mul(wide, 1 / self.first_divisor, out=self.layout.view(self.grads, p))

    def _make_room(self) -> None:
        if self.grads is None:
            self.grads = torch.empty(self.layout.shape, dtype=self.reduced_in, device=self.device)
            self.grads[self.layout.numel :] = 0
            announce("buckets", [self.grads])

    def send_gradients(self, names: dict[Tensor, str], process_group) -> None:
        for p in self.params:
            if p not in self.ready and p.grad is not None:  # of an earlier micro-batch
                self.collect(p, names[p])
                self.ready.add(p)
        self.missing = set(self.params) - self.ready
        for p in self.missing:
            self._make_room()
            self.layout.view(self.grads, p).fill_(-0.0)
        self._mark_used()
        self.ready.update(self.params)
        self.mine = torch.empty_like(self.grads[self.layout.slice])
        announce("buckets", [self.mine])
        self.work = reduce_scatter(self.mine, self.grads, group=process_group, async_op=True)

    @property
    def indexed(self) -> bool:
        """Whether it keeps the places at which pieces begin, 8 bytes each, for steps that use all of them."""
        return self._heads is not None

    def _mark_used(self) -> None:
        """Leave no -0.0 where the pieces of gradients begin: 0.0 is added to one element of each."""
        if self.missing:
            heads = [i for p in self.params if p in self.ready for i in self.layout.heads[p]]
            heads = torch.tensor(heads, dtype=torch.int64, device=self.device)
        else:
            if self._heads is None:
                every = [i for heads in self.layout.heads.values() for i in heads]
                self._heads = torch.tensor(every, dtype=torch.int64, device=self.device)
            heads = self._heads
        self.grads[heads] = self.grads[heads] + 0.0

    def receive_gradients(self, world_size: int) -> None:
        wait(self.work)
        self.grads = self.work = None
        cuts = self.layout.cuts
        self.missing = {
            p for p in self.missing if p in cuts and is_negative_zero(self.mine[cuts[p].start])
        }
        rest = world_size / self.first_divisor
        if rest != 1:
            precise = torch.promote_types(self.reduced_in, self.stepped_in)
            self.mine = self.mine.to(precise).div_(rest)
        self.mine = self.mine.to(self.stepped_in)
        announce("buckets", [self.mine])


class FlatPieces(FlatGradients):
    """And what the optimizer sees: each parameter's piece in this rank's slice of `weights`.

    One step::

        hand_out_gradients   `mine` becomes the gradients of the pieces, which the optimizer then steps
        take_step            what was stepped is in the slice of `weights`; the gradients are gone

    From here on each parameter is a view of the flat `weights`, (world_size * width,). `pieces` are
    parameters, too, 1-D: views of the slice; or, if that is stepped in another dtype, a master copy,
    made at the first step as all state is. Then weights are the master copy, rounded. Where they are
    not, somebody has written them since, and they count.
    """

    def __init__(
        self, params: list[Tensor], index: int, rank: int, world_size: int, partition: Flat
    ):
        super().__init__(params, index, rank, world_size, partition)
        self.weights = params[0].new_zeros(self.layout.shape)
        for p in params:
            settle(p, self.layout.view(self.weights, p), self.weights)
        self.pieces = {p: nn.Parameter(self._weights_of(p)) for p in self.layout.cuts}
        self.has_master = self.stepped_in != self.weights.dtype

    def _weights_of(self, p: Tensor) -> Tensor:
        return self.weights[self.layout.slice][self.layout.cuts[p]]

    @torch.no_grad()
    def hand_out_gradients(self) -> None:
        for p, piece in self.pieces.items():
            piece.grad = None
            if p not in self.missing:
                if self.has_master:
                    self._update_master(piece, self._weights_of(p))
                piece.grad = self.mine[self.layout.cuts[p]]

    def _update_master(self, piece: nn.Parameter, weights: Tensor) -> None:
        if piece.dtype != self.stepped_in:
            piece.data = weights.to(self.stepped_in)
        else:
            torch.where(piece.to(weights.dtype) == weights, piece, weights, out=piece)

    def pieces_with_grad(self) -> dict[Tensor, nn.Parameter]:
        return {p: piece for p, piece in self.pieces.items() if piece.grad is not None}

    def take_step(self) -> None:
        for p, piece in self.pieces_with_grad().items():
            if self.has_master:
                self._weights_of(p).copy_(piece)
            piece.grad = None
        self.mine = None
        torch.autograd.graph.increment_version(
            self.params
        )  # backward that still needs the old ones raises

    def take_state(self, p: Tensor, entry: dict) -> dict:
        """This rank's part of p's state: of what is one number per element its piece, of the rest a copy."""
        state = {}
        for key, value in entry.items():
            if not is_counter(key) and isinstance(value, Tensor) and value.shape == p.shape:
                state[key] = self.layout.cut(p, value).to(self.device, self.stepped_in, copy=True)
            else:
                state[key] = value.clone() if isinstance(value, Tensor) else value
        self.take_master(p, state)
        return state

    def take_master(self, p: Tensor, state: dict) -> None:
        """The master copy in the state of this piece, or else of the weights, becomes the piece."""
        master = state.pop(MASTER, None)
        if self.has_master:
            self.pieces[p].data = (
                self._weights_of(p).to(self.stepped_in) if master is None else master
            )
            state[MASTER] = self.pieces[p].detach()


class FlatBucket(FlatPieces):
    """And how new weights go around, after the step.

    One step::

        send_parameters      launch the all-gather of all slices of `weights`, in place
        guard                optional: from here on, whatever reads a parameter waits for it
        receive_parameters   wait for it
    """

    is_ahead = False  # this rank's slice is stepped, and the others do not know
    gather: dist.Work | None = None  # the all-gather

    def collect(self, p: Tensor, name: str) -> None:
        if not self.layout.holds(self.weights, p):
            raise RuntimeError(
                f"{name} has left the optimizer's flat buffer (the model was moved, or wrapped for "
                "another optimizer); make the optimizer again, and then the wrapper"
            )
        super().collect(p, name)

    def take_step(self) -> None:
        super().take_step()
        self.is_ahead = True

    def send_parameters(self, process_group) -> None:
        self.is_ahead = False
        mine = self.weights[self.layout.slice]
        self.gather = all_gather(self.weights, mine, group=process_group, async_op=True)

    def receive_parameters(self) -> None:
        if self.gather is not None:
            wait(self.gather)
            self.gather = None
            for p in self.params:
                if type(p) is Arriving:
                    p.__class__ = nn.Parameter
                    del p.arrives_in

    def __del__(self):
        # Whoever drops a bucket gives its memory back to the stream that computes. That stream first waits
        # for a gather that still writes there.
        if self.gather is not None and streams.on_gpu(self.weights):
            self.gather.wait()

    def guard(self) -> None:
        if self.gather is None:
            return
        if any(type(p) not in (nn.Parameter, Arriving) for p in self.params):
            return self.receive_parameters()  # of a class of its own: cannot be guarded
        for p in self.params:
            p.__class__ = Arriving
            p.arrives_in = self


def is_negative_zero(t: Tensor) -> bool:
    return bool(((t == 0) & torch.signbit(t)).all())


@torch.no_grad()
def check_negative_zero(buckets: Sequence[FlatBucket], process_group) -> None:
    """Does this group's reduce-scatter keep -0.0? A sum that begins with +0.0 would not.

    Backends choose their algorithm by size, so each bucket's own size is tried, once.
    """
    device = buckets[0].device if buckets else "cpu"
    lost = torch.zeros(1, dtype=torch.int32, device=device)
    for dtype, numel in dict.fromkeys((b.reduced_in, b.layout.shape[0]) for b in buckets):
        sent = torch.full((numel,), -0.0, dtype=dtype, device=device)
        mine = torch.empty_like(sent[: numel // dist.get_world_size(process_group)])
        reduce_scatter(mine, sent, group=process_group)
        lost += 0 if is_negative_zero(mine) else 1
    dist.all_reduce(lost, group=process_group)
    if lost:
        raise RuntimeError(
            "this backend's sum of -0.0 over the ranks is not -0.0, so it cannot be told which parameters "
            "got no gradient; use SimpleDDPBucketAsync with ShardedOptimizer, which sends flags"
        )
