"""What a trace tells about reads and stages beside their times."""

import os
import threading

import numpy as np
import pytest

from atoll.data.cachewriter import write_cache
from atoll.data.loader import TokenLoader
from atoll.data.trace import LoaderTrace, thread_storage_bytes

SHARD_TOKENS = 2 << 20


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Two groups of one shard of 4 MiB each."""
    ids = np.arange(2 * SHARD_TOKENS) % 1000
    return write_cache(tmp_path_factory.mktemp("cache"), train=ids, shard_tokens=SHARD_TOKENS)


def open_loader(cache, **options) -> TokenLoader:
    options = {"prefetch": False} | options
    return TokenLoader(cache, "train", context_length=1023, seed=0, group_shards=1, **options)


def evict(path) -> None:
    """Ask the kernel to forget the file, and skip the test where it does not."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            os.preadv(file.fileno(), [bytearray(1)], path.stat().st_size // 2, os.RWF_NOWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            pytest.skip(f"the file system does not say what is in memory: {error}")
    pytest.skip("the file system keeps evicted pages in memory")


@pytest.mark.skipif(thread_storage_bytes() is None, reason="nobody counts here")
def test_a_cold_read_is_told_from_a_warm_one(cache):
    shard = cache.folder / cache.manifest.splits["train"].shards[0].file
    evict(shard)
    trace = LoaderTrace()
    for _ in range(2):
        with open_loader(cache, trace=trace) as loader:
            loader.batch(0, 1)

    cold, warm = trace.reads
    assert cold.storage_bytes is not None
    # Readahead may have begun before the probe, and a neighbouring token is one more page.
    assert 0.5 * cold.bytes <= cold.storage_bytes <= 1.5 * cold.bytes
    assert warm.storage_bytes == 0


@pytest.mark.skipif(thread_storage_bytes() is None, reason="nobody counts here")
def test_what_another_thread_fetches_is_not_counted(cache):
    shard = cache.folder / cache.manifest.splits["train"].shards[1].file
    evict(shard)
    before = thread_storage_bytes()
    thread = threading.Thread(target=shard.read_bytes)
    thread.start()
    thread.join()
    assert thread_storage_bytes() == before


def test_what_stands_around_the_source_reads_every_group(cache):
    read: list[int] = []

    class Counting:
        def __init__(self, source):
            self.source, self.dtype = source, source.dtype

        def read(self, group, take, *, stop=None):
            read.append(group)
            self.source.read(group, take, stop=stop)

    with open_loader(cache) as plain, open_loader(cache, around_source=Counting) as loader:
        expected = plain.batch(0, loader.num_rows).inputs_BT
        assert (loader.batch(0, loader.num_rows).inputs_BT == expected).all()
        assert loader.identity == plain.identity
    assert read == [0, 1]


@pytest.mark.gpu
def test_every_batch_on_a_gpu_lies_between_two_events_that_nobody_waits_for(cache):
    import torch

    device = torch.device("cuda")
    trace = LoaderTrace(gap_device=device)
    with open_loader(cache, device=device, placement="device", trace=trace) as loader:
        loader.batch(0, 1)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        for cursor in range(1, 4):
            loader.batch(cursor, 1)
        assert not trace.gap_events[-1][1].query()  # still asleep: nothing waited for it
    torch.cuda.synchronize()
    assert [start.elapsed_time(end) >= 0 for start, end in trace.gap_events] == [True] * 4
