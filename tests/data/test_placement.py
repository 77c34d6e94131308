"""Where groups live and batches are made changes the time they take, and nothing else."""

import numpy as np
import pytest
import torch

from atoll.data.cache import Cache
from atoll.data.cachewriter import write_cache
from atoll.data.device import DevicePlacement
from atoll.data.loader import TokenLoader
from atoll.data.placement import (
    HostPlacement,
    PageableBatches,
    PinnedBatches,
    build_placement,
    resolve_placement,
)
from atoll.data.trace import LoaderTrace
from atoll.errors import UnavailableError, UsageError


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Cache:
    """Counter tokens over seven groups, and a validation split that ends in a partial row."""
    folder = tmp_path_factory.mktemp("cache")
    return write_cache(
        folder, train=np.arange(60_000), validation=np.arange(1, 1004), shard_tokens=4500
    )


def open_loader(cache, split="train", **options) -> TokenLoader:
    return TokenLoader(cache, split, context_length=32, seed=0, group_shards=2, **options)


def addresses(loader, *, batches: int, keep: bool) -> list[int]:
    """Return where each batch lies, holding on to all of them or to none."""
    held, found = [], []
    for index in range(batches):
        batch = loader.batch(8 * index, 8)
        found.append(batch.inputs_BT.data_ptr())
        if keep:
            held.append(batch)
        del batch
    return found


def test_batches_that_are_held_never_share_memory(cache):
    with open_loader(cache) as loader:
        assert len(set(addresses(loader, batches=20, keep=True))) == 20


def test_memory_of_a_dead_batch_is_used_again(cache):
    with open_loader(cache) as loader:
        assert len(set(addresses(loader, batches=20, keep=False))) == 1


@pytest.mark.parametrize(
    "part",
    [
        lambda batch: batch.inputs_BT,
        lambda batch: batch.targets_BT,
        lambda batch: batch.inputs_BT[3:5, 1:],
        lambda batch: batch.targets_BT.view(2, 4, 32)[1],
        lambda batch: batch.inputs_BT.numpy(),
        lambda batch: batch.targets_BT.detach().untyped_storage(),
    ],
    ids=["inputs", "targets", "slice", "view", "numpy", "storage"],
)
def test_any_part_of_a_batch_keeps_its_memory(cache, part):
    with open_loader(cache) as loader:
        batch = loader.batch(0, 8)
        address, kept = batch.inputs_BT.data_ptr(), part(batch)
        del batch
        later = [loader.batch(8 * index, 8).inputs_BT.data_ptr() for index in range(1, 5)]
        assert address not in later
        del kept
        assert address in addresses(loader, batches=2, keep=True)


def test_batches_saved_for_backward_keep_their_memory(cache):
    embedding = torch.nn.Embedding(60_000, 2)
    with open_loader(cache) as loader:
        first = loader.batch(0, 8).inputs_BT.clone()
        loss = embedding(loader.batch(0, 8).inputs_BT).sum()
        for index in range(1, 5):
            loader.batch(8 * index, 8)
        loss.backward()
    assert embedding.weight.grad is not None
    touched = embedding.weight.grad[:, 0].nonzero().flatten()
    assert torch.equal(touched, first.unique())


@pytest.mark.parametrize("prefetch", [True, False])
def test_groups_change_under_inference_mode_and_back(cache, prefetch):
    """Evaluation opens and fills groups under inference mode; the reader thread is not in it."""
    placement = DevicePlacement(torch.device("cpu"))
    with open_loader(cache, prefetch=False) as loader:
        expected = [loader.batch(cursor, 200).inputs_BT.clone() for cursor in range(0, 1800, 200)]
    with open_loader(cache, placement=placement, prefetch=prefetch) as loader:
        for turn, cursor in enumerate(range(0, 1800, 200)):
            with torch.inference_mode(turn % 3 != 2):
                assert torch.equal(loader.batch(cursor, 200).inputs_BT, expected[turn])


def test_automatic_placement_is_device_on_a_gpu_and_pageable_elsewhere():
    assert resolve_placement("auto", "cuda:1") == "device"
    assert resolve_placement("auto", "cpu") == "pageable"
    assert resolve_placement("auto", torch.device("mps")) == "pageable"
    assert resolve_placement("pinned", "cpu") == "pinned"


@pytest.mark.parametrize("name", ["pinned", "device"])
def test_a_placement_that_needs_a_gpu_is_refused_without_one(cache, name):
    message = f"data.placement is '{name}', which needs a CUDA device; the device is cpu"
    with pytest.raises(UnavailableError, match=message) as caught:
        open_loader(cache, placement=name)
    assert caught.value.exit_code == 2
    assert "auto or pageable" in str(caught.value.hint)


def test_device_placement_reports_a_gather_stage_and_no_pin_or_copy(cache):
    trace = LoaderTrace()
    placement = DevicePlacement(torch.device("cpu"), trace=trace)
    with open_loader(cache, placement=placement, trace=trace) as loader:
        for cursor in range(0, 80, 8):
            loader.batch(cursor, 8)

    assert set(trace.stage_seconds) == {"batch", "gather"}
    assert [len(seconds) for seconds in trace.stage_seconds.values()] == [10, 10]
    assert trace.copy_events == []


def test_memory_is_stated_for_each_placement(cache):
    slot_bytes = 282 * 33 * 2  # ceil(9000 / 32) rows of 33 tokens of 2 bytes
    host = open_loader(cache)
    device = open_loader(cache, placement=DevicePlacement(torch.device("cpu")))
    without = open_loader(cache, prefetch=False)
    rest = host.peak_host_bytes - 2 * slot_bytes

    assert device.peak_host_bytes == slot_bytes + rest
    assert device.peak_device_bytes == 2 * slot_bytes
    assert (host.peak_device_bytes, without.peak_device_bytes) == (0, 0)
    assert without.peak_host_bytes == slot_bytes + rest
    for loader in (host, device, without):
        loader.close()


def test_an_empty_ring_is_refused():
    with pytest.raises(UsageError, match="0 buffers"):
        PinnedBatches(torch.device("cuda"), depth=0)


# With a GPU ---------------------------------------------------------------------------------------

PLACEMENTS = ("pageable", "pinned", "device")


def rows_of(loader, *, sizes=(1, 7, 40, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    batches, cursor, turn = [], 0, 0
    while cursor < loader.num_rows:
        rows = min(sizes[turn % len(sizes)], loader.num_rows - cursor)
        batches.append(loader.batch(cursor, rows))
        cursor, turn = cursor + rows, turn + 1
    inputs = torch.cat([batch.inputs_BT for batch in batches])
    return inputs.cpu(), torch.cat([batch.targets_BT for batch in batches]).cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("prefetch", [True, False])
def test_a_gpu_gets_the_rows_that_a_cpu_gets(cache, split, placement, prefetch):
    with open_loader(cache, split, prefetch=False) as loader:
        expected = rows_of(loader)
    options = {"placement": placement, "prefetch": prefetch, "device": "cuda"}
    with open_loader(cache, split, **options) as loader:
        found = rows_of(loader)
    assert all(torch.equal(left, right) for left, right in zip(expected, found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_batches_survive_on_a_slow_stream_while_later_ones_are_made(cache, placement):
    """Copies wait behind 50 ms of sleep each; the host runs ahead over group borders."""
    with open_loader(cache, prefetch=False) as loader:
        expected = [loader.batch(cursor, 100).inputs_BT for cursor in range(0, 1800, 100)]
    stream = torch.cuda.Stream()
    with (
        open_loader(cache, placement=placement, device="cuda") as loader,
        torch.cuda.stream(stream),
    ):
        found = []
        for cursor in range(0, 1800, 100):
            torch.cuda._sleep(100_000_000)
            found.append(loader.batch(cursor, 100).inputs_BT)
    stream.synchronize()
    for left, right in zip(expected, found, strict=True):
        assert torch.equal(left, right.cpu())


@pytest.mark.gpu
def test_groups_are_not_replaced_while_any_stream_still_reads_them(cache):
    """Each batch is made on another of three slowed streams; groups change beneath them."""
    with open_loader(cache, prefetch=False) as loader:
        expected = [loader.batch(cursor, 60).inputs_BT for cursor in range(0, 1800, 60)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    with open_loader(cache, placement="device", device="cuda") as loader:
        for turn, cursor in enumerate(range(0, 1800, 60)):
            with torch.cuda.stream(streams[turn % 3]):
                torch.cuda._sleep(50_000_000)
                found.append(loader.batch(cursor, 60).inputs_BT)
    torch.cuda.synchronize()
    for left, right in zip(expected, found, strict=True):
        assert torch.equal(left, right.cpu())


@pytest.mark.gpu
def test_the_ring_makes_the_host_wait_rather_than_overwrite(cache):
    placement = HostPlacement(PinnedBatches(torch.device("cuda"), depth=1))
    with open_loader(cache, prefetch=False) as loader:
        expected = [loader.batch(cursor, 10).inputs_BT for cursor in range(0, 100, 10)]
    stream = torch.cuda.Stream()
    with (
        open_loader(cache, placement=placement, device="cuda") as loader,
        torch.cuda.stream(stream),
    ):
        found = []
        for cursor in range(0, 100, 10):
            torch.cuda._sleep(20_000_000)
            found.append(loader.batch(cursor, 10).inputs_BT)
    stream.synchronize()
    assert all(torch.equal(a, b.cpu()) for a, b in zip(expected, found, strict=True))


@pytest.mark.gpu
def test_two_ways_alternate_on_one_loader(cache):
    trace = LoaderTrace(copy_sample_interval=2)
    device = torch.device("cuda")
    ways = PageableBatches(device, trace=trace), PinnedBatches(device, trace=trace)
    placement = HostPlacement(ways[0])
    with open_loader(cache, prefetch=False) as loader:
        expected = [loader.batch(cursor, 10).inputs_BT for cursor in range(0, 200, 10)]
    with open_loader(cache, placement=placement, trace=trace, device=device) as loader:
        for turn, cursor in enumerate(range(0, 200, 10)):
            placement.batches = ways[turn % 2]
            assert torch.equal(loader.batch(cursor, 10).inputs_BT.cpu(), expected[turn])
    assert len(trace.stage_seconds["pin"]) == 10
    assert len(trace.stage_seconds["copy_enqueue"]) == 20
    assert len(trace.copy_events) == 10
    torch.cuda.synchronize()
    assert all(start.elapsed_time(end) >= 0 for start, end in trace.copy_events)


@pytest.mark.gpu
def test_a_gpu_widens_ids_above_the_sign_bit(tmp_path):
    ids = np.arange(65_536 - 1000, 65_536)
    cache = write_cache(tmp_path, train=ids, shard_tokens=300, vocab_size=65_536)
    with open_loader(cache, placement="device", device="cuda") as loader:
        rows = loader.batch(0, loader.num_rows).inputs_BT
    assert sorted(rows.flatten().tolist()) == ids[: 31 * 32].tolist()


@pytest.mark.gpu
def test_build_placement_makes_what_it_is_asked_for():
    assert [build_placement(name, "cuda").name for name in PLACEMENTS] == list(PLACEMENTS)
