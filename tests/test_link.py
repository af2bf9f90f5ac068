"""The emulated link: exact results, the time that was asked for, and clear words for what it cannot do."""

import os
import time
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import zero1_helpers as z
from zero1_helpers.measure import link as links
from zero1_helpers.measure.emulate import current, emulate
from zero1_helpers.measure.link import Link, parse_link
from zero1_helpers.measure.passage import Passage, lane, late_share
from zero1_helpers.measure.runs import load_run
from zero1_helpers.training.record import auto_link

MB = 1e6


def test_a_link_is_read_as_people_write_it():
    assert parse_link("none") is None
    assert parse_link("250MB/s") == Link(250e6)
    assert parse_link("1.5 GB/s + 20us") == Link(1.5e9, 20 * 1e-6)
    assert parse_link("10Gbit/s").bandwidth == parse_link("10gbit").bandwidth == 1.25e9
    assert str(parse_link("0.25 GB/s + 2 ms")) == "250 MB/s + 2 ms"
    nearly_nothing = Link(8.62, 725e-6)  # what `auto` makes of one rank, which sends nothing
    for link in [*links.PRESETS.values(), Link(92.4e6, 1.25e-3), nearly_nothing]:
        assert parse_link(str(link)).seconds("broadcast", 1e9, 4) == pytest.approx(
            link.seconds("broadcast", 1e9, 4), rel=0.01
        )


@pytest.mark.parametrize(
    "text, words",
    [
        ("fast", "unknown link 'fast'; write none, auto, nvlink"),
        ("100 miles/s", "unknown link"),
        ("-5MB/s", "bandwidth above 0"),
        ("0MB/s", "bandwidth above 0"),
        ("1MB/s + 3 h", "unknown link"),
    ],
)
def test_what_is_no_link_is_said_in_one_line(text, words):
    with pytest.raises(ValueError, match=words) as error:
        parse_link(text)
    assert "\n" not in str(error.value)


def test_the_time_is_latency_and_the_rings_bytes():
    link = Link(100 * MB, 0.002)
    for op, factor in [
        ("all_reduce", 1.5),
        ("reduce_scatter", 0.75),
        ("all_gather", 0.75),
        ("broadcast", 1.0),
    ]:
        assert link.seconds(op, 8 * MB, 4) == pytest.approx(0.002 + factor * 0.08)
        assert link.seconds(op, 8 * MB, 1) == 0
    with pytest.raises(ValueError, match="unknown collective"):
        link.seconds("gather", 1, 4)


def test_an_operation_is_late_when_it_is_late_on_every_rank():
    assert late_share([[True, True, False], [True, False, False]]) == pytest.approx(1 / 3)
    assert late_share([[], []]) == 0


def collectives(rank, world_size):
    """Every collective, blocking and not, over gloo and over the link: (results, results)."""
    found = []
    for link in (None, "2GB/s"):
        emulate(link)
        mine = torch.arange(8.0) + rank
        tensors = [mine.clone() for _ in range(3)]
        works = [
            dist.all_reduce(tensors[0], async_op=True),
            dist.broadcast(tensors[1], src=world_size - 1, async_op=True),
            dist.all_reduce(tensors[2], op=dist.ReduceOp.MAX, async_op=True),
        ]
        for work in works:
            work.wait()
        parts = [torch.empty(8) for _ in range(world_size)]
        dist.all_gather(parts, mine)
        whole, part = torch.empty(world_size * 8), torch.empty(8)
        dist.all_gather_single(whole, mine)
        dist.reduce_scatter_single(part, whole * (rank + 1))
        dist.reduce_scatter(tensors[0], list(whole.chunk(world_size)))
        objects = [None] * world_size
        dist.all_gather_object(objects, {"rank": rank})
        sent = [rank]
        dist.broadcast_object_list(sent, src=0)
        dist.barrier()
        future = dist.all_reduce(mine, async_op=True).get_future()
        future.wait()
        found.append([*tensors, *parts, whole, part, objects, sent, mine])
    return found


def test_results_are_those_of_gloo(ranks):
    for plain, emulated in ranks(collectives, 3):
        for a, b in zip(plain, emulated, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def reduce_scatters(rank, world_size):
    """For each operation: the slice that came over the link, and the slice of gloo's all-reduce."""
    emulate("2GB/s")
    mine = torch.linspace(0.1, 2, 5 * world_size, dtype=torch.float64).roll(
        rank
    )  # not the same on two ranks
    found = {}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        slice_, whole = torch.empty(5, dtype=torch.float64), mine.clone()
        dist.reduce_scatter_single(slice_, mine, op=op)
        dist.all_reduce(whole, op=op)
        found[str(op)] = (slice_, whole.chunk(world_size)[rank])
    mean, total = torch.empty(5, dtype=torch.float64), found[str(dist.ReduceOp.SUM)][1]
    dist.reduce_scatter_single(mean, mine, op=dist.ReduceOp.AVG)
    found["mean"] = (mean, total / world_size)
    with pytest.raises(NotImplementedError, match="reduce_scatter does not know"):
        dist.reduce_scatter_single(
            torch.empty(5).int(), torch.ones(15).int(), op=dist.ReduceOp.BAND
        )
    return found


def test_a_reduce_scatter_is_a_slice_of_the_all_reduce(ranks):
    for of_rank in ranks(reduce_scatters, 3):
        assert len(of_rank) == 5
        for op, (ours, whole) in of_rank.items():
            torch.testing.assert_close(ours, whole, rtol=1e-14, atol=0, msg=op)


def chain(rank, world_size, computing):
    """Seconds asked for and seen, of chains of operations that take at least twice gloo's own time."""
    data = torch.ones(500_000)  # 2 MB
    work = torch.randn(200, 200)

    def seconds(count):
        dist.barrier()
        began = time.perf_counter()
        for sent in [dist.all_reduce(data, async_op=True) for _ in range(count)]:
            while computing and not sent.is_completed():
                work @ work  # on every rank
            sent.wait()
        return time.perf_counter() - began

    emulate(None)
    seconds(5)
    slowest = torch.tensor(max(seconds(5) for _ in range(3)) / 5)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    each = max(0.02, 2 * slowest.item())
    emulate(Link(1.5 * 2e6 / each))
    seen = sorted(seconds(10) for _ in range(5))[2]
    return each * 10, seen


@pytest.mark.parametrize("computing", [False, True])
def test_a_chain_takes_the_time_that_was_asked_for(ranks, computing):
    for asked, seen in ranks(chain, 4, computing):
        assert seen == pytest.approx(asked, rel=0.1)


def one_queue(rank, world_size):
    """begin and deadline of three operations issued at once, two of them in another group."""
    emulate("20MB/s + 1ms")
    other = dist.new_group()
    lane.log = log = []
    works = [
        dist.all_reduce(torch.ones(25_000), group=group, async_op=True)
        for group in (None, other, other)
    ]
    for work in works:
        work.wait()
    lane.log = None
    ended = time.time_ns()
    dist.barrier()
    return [(t.begin, t.deadline) for t in log], ended


def test_collectives_of_one_rank_queue_on_its_one_link(ranks):
    for spans, ended in ranks(one_queue, 2):
        assert [end - begin for begin, end in spans] == [6_000_000] * 3  # 1 ms + 100 kB / 20 MB/s
        assert all(before[1] == after[0] for before, after in zip(spans, spans[1:], strict=False))
        assert ended >= spans[-1][1]


def refused(rank, world_size):
    emulate("1GB/s")
    with pytest.raises(NotImplementedError, match="does not know what gather costs"):
        dist.gather(torch.ones(1), [torch.ones(1)] * world_size if rank == 0 else None)
    with pytest.raises(ValueError, match="unknown link"):
        emulate("quick")
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=dist.HashStore())
    with pytest.raises(ValueError, match="over gloo, not over fake"):
        emulate("1GB/s")
    dist.destroy_process_group()


def test_what_cannot_be_emulated_is_refused(ranks):
    ranks(refused, 2)


def net():
    torch.manual_seed(3)
    return torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6))).double()


def whole(p):
    """A copy of a parameter, put together from its shards where FSDP2 has made some."""
    full = torch.empty(p.shape, dtype=p.dtype)
    if hasattr(p, "to_local"):
        dist.all_gather_single(full, p.to_local())
        return full
    return full.copy_(p)


def peers(rank, world_size):
    """Parameters after two steps of SGD, by torch's own classes and by ours, all over one link."""
    emulate("200MB/s")
    sgd = torch.optim.SGD
    results = {}
    for name in (
        "DDP",
        "DDP + ZeRO",
        "DDP + ZeRO, views",
        "FSDP2",
        "buckets",
        "overlapped",
        "flat",
    ):
        model = net()
        if name == "FSDP2":
            for layer in model:
                fully_shard(layer, reshard_after_forward=False)
            wrapped, optimizer = fully_shard(model, reshard_after_forward=False), None
            optimizer = sgd(model.parameters(), lr=0.1)
        elif name == "overlapped":
            optimizer = z.ShardedOptimizer(sgd, model, lr=0.1)
            wrapped = z.SimpleDDPBucketAsync(model, optimizer, bucket_cap_mb=0.01)
        elif name == "flat":
            optimizer = z.FlatShardedOptimizer(sgd, model, 0.01, lr=0.1)
            wrapped = z.SimpleDDPReduceScatter(model, optimizer)
        elif name == "buckets":
            wrapped, optimizer = (
                z.SimpleDDPBucket(model, 0.01),
                z.ZeROOne(sgd(model.parameters(), lr=0.1)),
            )
        else:
            wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01)
            optimizer = (
                sgd(model.parameters(), lr=0.1)
                if name == "DDP"
                else ZeroRedundancyOptimizer(
                    model.parameters(), sgd, lr=0.1, parameters_as_bucket_view="views" in name
                )
            )
        for step in range(2):
            torch.manual_seed(rank + 9 * step)
            x = torch.randn(4, 32, dtype=torch.float64)
            wrapped(x).square().sum().backward()
            for wait in ("flush_bucket", "wait_for_gradients", "wait_for_broadcasts"):
                getattr(wrapped, wait, lambda: None)()
            optimizer.step()
            optimizer.zero_grad()
        results[name] = [whole(p.detach()) for p in model.parameters()]
    return results


def test_torchs_own_classes_and_ours_agree_over_a_link(ranks):
    for results in ranks(peers, 2, timeout=180):
        for name, params in results.items():
            for p, wanted in zip(params, results["DDP"], strict=True):
                torch.testing.assert_close(p, wanted, rtol=0, atol=1e-12, msg=name)


def record_on_a_link(rank, world_size, folder):
    emulate("20MB/s + 2ms")
    z.record("ddp", "tiny", 2, folder / "slow")
    emulate("nvlink")
    z.record("ddp", "tiny", 2, folder / "impossible")
    emulate(None)
    z.record("ddp", "tiny", 2, folder / "plain")
    z.use_link(folder=folder, preset="tiny")  # that of the latest run over a link
    assert str(current()) == str(links.PRESETS["nvlink"])
    link = auto_link("tiny", steps=1)
    assert link == replace(parse_link(str(link)), source=link.source)  # as it will be written
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {rank}
    return link.bandwidth, link.latency, cores


def test_a_run_over_a_link_says_so_and_shows_its_times(ranks, tmp_path):
    auto = ranks(record_on_a_link, 2, tmp_path, timeout=240)
    (*link, cores), (*other, its_cores) = auto
    assert link == other and min(link) > 0  # one link for all ranks
    assert not cores & its_cores or len(cores | its_cores) == 1
    slow, impossible, plain = (
        load_run(tmp_path / name) for name in ("slow", "impossible", "plain")
    )
    assert slow.record["link"] == "20 MB/s + 2 ms" and plain.record["link"] == "none"
    assert "emulated link 20 MB/s + 2 ms" in slow.caption and "no emulated link" in plain.caption
    assert slow.record["backend"] == plain.record["backend"] == "gloo"
    assert slow.record["collectives"] == plain.record["collectives"]
    assert impossible.record["late_share"] > 0.5 > slow.record["late_share"]
    assert "of the operations took gloo longer" in impossible.caption
    assert slow.record["losses"] == plain.record["losses"]

    asked = [
        Link(20 * MB, 0.002).seconds("all_reduce", c["bytes"] / c["calls"], 2) * c["calls"]
        for c in slow.record["collectives"]
    ]
    for rank in range(2):
        kernels = [
            e for e in slow.trace(rank)["traceEvents"] if e["name"].startswith("ncclKernel[link:")
        ]
        assert len(kernels) == 2 * sum(c["calls"] for c in slow.record["collectives"])
        assert sum(e["dur"] for e in kernels) / 1e6 > 2 * sum(asked) * 0.99
        assert {e["args"].get("phase") for e in kernels} == {"sync"}
        for e in kernels:  # a blocking collective: nothing is computed while it is on its way
            assert not [
                c
                for c in slow.trace(rank)["traceEvents"]
                if c["name"].startswith("aten::")
                and e["ts"] + 200 < c["ts"] + c["dur"] / 2 < e["ts"] + e["dur"] - 200
            ]


def test_an_operation_knows_whether_it_was_late():
    early, late = (Passage("all_reduce", 1, 0, deadline) for deadline in (2**63, 1))
    for passage in (early, late):
        assert not passage.late
        passage.stamp()
    assert late.late and not early.late
    assert early.end == early.deadline and late.end == late.done


def keep_a_log(rank, world_size):
    emulate("1GB/s")
    lane.log = log = []
    tensor = torch.ones(1000)
    storage = weakref.ref(tensor.untyped_storage())
    dist.all_reduce(tensor, async_op=True).wait()
    del tensor
    lane.log = None
    return len(log), storage() is None


def test_what_was_sent_is_not_kept_alive(ranks):
    assert ranks(keep_a_log, 2) == [(1, True)] * 2
