"""One background thread: what it prefetches, what is recorded, and that it always ends."""

import contextlib
import gc
import signal
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from concurrent.futures import CancelledError

import numpy as np
import pytest

from atoll.data.cache import Cache
from atoll.data.cachewriter import write_cache
from atoll.data.loader import TokenLoader
from atoll.data.reader import THREAD_NAME, BackgroundReader
from atoll.data.trace import LoaderTrace

LIMIT_SECONDS = 60
"""Far above what any step here takes; a test that reaches it hangs."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Cache:
    """The reference geometry at 1/65,536: shards of 512 tokens, rows of 16, 64 rows a group."""
    ids = np.arange(10 * 512)
    return write_cache(tmp_path_factory.mktemp("cache"), train=ids, shard_tokens=512)


@pytest.fixture(scope="module")
def large_cache(tmp_path_factory) -> Cache:
    """Two groups of 32 MiB."""
    ids = np.zeros(32 << 20, np.uint16)
    return write_cache(tmp_path_factory.mktemp("large"), train=ids, shard_tokens=8 << 20)


def open_loader(cache, **options) -> TokenLoader:
    return TokenLoader(cache, "train", context_length=16, seed=0, group_shards=2, **options)


def reader_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == THREAD_NAME}


@pytest.fixture
def before() -> set[threading.Thread]:
    """Reader threads of loaders that other tests still hold."""
    return reader_threads()


class SlowReads:
    """A clock that holds the reader thread at the start of every read until it is told to stop."""

    def __init__(self) -> None:
        self.loader: TokenLoader | None = None

    def __call__(self) -> float:
        if threading.current_thread().name == THREAD_NAME:
            assert self.loader is not None
            assert self.loader._shelf._reader is not None
            self.loader._shelf._reader._stop.wait(LIMIT_SECONDS)
        return 0.0


def wait_for_prefetch(loader) -> None:
    pending = loader._shelf._pending
    if pending is not None:
        pending.future.exception(timeout=LIMIT_SECONDS)


def test_groups_are_activated_where_the_reference_run_activates_them(cache):
    trace = LoaderTrace()
    with open_loader(cache, trace=trace) as loader:
        for cursor in range(0, loader.num_rows - 8, 8):
            loader.batch(cursor, 8)
            wait_for_prefetch(loader)

    assert [(a.batch, a.group, a.cursor) for a in trace.activations] == [
        (8 * group + 1, group, 64 * group) for group in range(5)
    ]
    assert [a.prefetched for a in trace.activations] == [False, True, True, True, True]
    assert [a.ready for a in trace.activations] == [None, True, True, True, True]
    assert [read.thread for read in trace.reads] == ["MainThread"] + [THREAD_NAME] * 4


def test_without_prefetch_every_group_is_read_in_the_foreground(cache, before):
    trace = LoaderTrace()
    with open_loader(cache, trace=trace, prefetch=False) as loader:
        loader.batch(0, loader.num_rows)
        assert reader_threads() <= before

    assert [(a.prefetched, a.ready) for a in trace.activations] == [(False, None)] * 5
    assert {read.thread for read in trace.reads} == {"MainThread"}


def test_the_next_pass_is_prefetched_across_the_seam(cache):
    trace = LoaderTrace()
    with open_loader(cache, trace=trace, passes=2) as loader:
        loader.batch(0, loader.num_rows)

    assert [a.group for a in trace.activations] == [0, 1, 2, 3, 4] * 2
    assert all(a.prefetched for a in trace.activations[1:])


def test_a_jump_is_read_in_the_foreground_and_prefetch_goes_on_from_there(cache):
    trace = LoaderTrace()
    with open_loader(cache, trace=trace) as loader:
        for cursor in (0, 3 * 64, 4 * 64, 0):
            assert loader.batch(cursor, 1).inputs_BT.shape == (1, 16)

    assert [(a.group, a.prefetched) for a in trace.activations] == [
        (0, False),
        (3, False),
        (4, True),
        (0, False),
    ]


def test_nothing_is_pending_after_the_last_group_or_after_close(cache):
    loader = open_loader(cache)
    assert loader.pending_prefetches == 0
    loader.batch(0, 1)
    assert loader.pending_prefetches == 1
    loader.batch(loader.num_rows - 1, 1)
    assert loader.pending_prefetches == 0
    loader.batch(0, 1)
    loader.close()
    assert loader.pending_prefetches == 0


def test_a_loader_that_needs_no_second_group_has_no_thread(cache, before):
    with TokenLoader(cache, "train", context_length=16, seed=0, group_shards=10) as loader:
        loader.batch(0, loader.num_rows)
        assert reader_threads() <= before


def test_close_ends_the_thread_in_the_middle_of_a_read(cache, before):
    clock = SlowReads()
    loader = clock.loader = open_loader(cache, trace=LoaderTrace(clock=clock))
    loader.batch(0, 1)
    (thread,) = reader_threads() - before
    pending = loader._shelf._pending
    assert pending is not None

    loader.close()

    assert not thread.is_alive()
    assert isinstance(pending.future.exception(timeout=0), CancelledError)


def test_a_jump_cuts_short_what_is_being_read(cache):
    clock = SlowReads()
    trace = LoaderTrace(clock=clock)
    with open_loader(cache, trace=trace) as loader:
        clock.loader = loader
        loader.batch(0, 1)
        loader.batch(3 * 64, 1)
        assert [read.thread for read in trace.reads] == ["MainThread"] * 2


def test_a_dropped_loader_takes_its_thread_along(cache, before):
    loader = open_loader(cache)
    loader.batch(0, 1)
    (thread,) = reader_threads() - before

    del loader
    gc.collect()

    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive()


def test_the_thread_carries_an_error_to_whoever_asks_for_the_result(before):
    reader = BackgroundReader[int]()

    def fail(_stop):
        raise OSError("no such disk")

    future = reader.submit(fail)
    with pytest.raises(OSError, match="no such disk"):
        future.result(LIMIT_SECONDS)
    assert reader.submit(lambda _: 5).result(LIMIT_SECONDS) == 5
    reader.close()
    assert reader_threads() <= before


def test_an_abandoned_job_is_told_to_stop_and_the_next_one_is_not():
    reader = BackgroundReader[bool]()
    future = reader.submit(lambda stop: stop.wait(LIMIT_SECONDS))

    reader.abandon(future)

    assert not reader.submit(lambda stop: stop.is_set()).result(LIMIT_SECONDS)
    reader.close()


@contextlib.contextmanager
def running(text: str):
    """Start a Python program; it is gone afterwards, whatever the test found."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(text)]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as program:
        try:
            yield program
        finally:
            program.kill()


READ_WITHOUT_END = """
    import hashlib
    import signal
    from atoll.data.reader import BackgroundReader

    def read(stop):
        while not stop.is_set():
            hashlib.sha256(bytes(1 << 22))

    # A shell starts jobs in the background with this signal ignored, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reader = BackgroundReader()
    future = reader.submit(read)
    print("reading", flush=True)
"""


def test_a_program_that_forgets_close_ends_in_silence():
    with running(READ_WITHOUT_END) as program:
        out, err = program.communicate(timeout=LIMIT_SECONDS)

    assert (program.returncode, out, err) == (0, "reading\n", "")


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT is sent differently there")
def test_an_interrupt_ends_a_program_that_waits_for_a_read():
    with running(READ_WITHOUT_END + "    future.result()\n") as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "reading\n"
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=LIMIT_SECONDS)

    assert program.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err


def test_host_memory_stays_within_what_is_stated(large_cache):
    tracemalloc.start()
    try:
        with open_loader(large_cache, passes=2) as loader:
            for cursor in range(0, loader.num_rows, 40_000):
                loader.batch(cursor, 16)
            _, peak_bytes = tracemalloc.get_traced_memory()
            # Two groups of 32 MiB, which the 16 + 1 tokens of a row make 34 MiB.
            assert 68 << 20 < loader.peak_host_bytes < 110 << 20
            assert peak_bytes < loader.peak_host_bytes + (2 << 20)  # batches and Python itself
    finally:
        tracemalloc.stop()


def test_nothing_is_timed_unless_somebody_listens(cache):
    def clock() -> float:
        raise AssertionError("the clock was read")

    with pytest.raises(AssertionError, match="clock"):
        open_loader(cache, trace=LoaderTrace(clock=clock), prefetch=False).batch(0, 1)
    with open_loader(cache) as loader:
        loader.batch(0, 100)
