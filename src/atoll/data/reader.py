"""The background reader: one thread, one job at a time, and a way out at any moment.

The thread is a daemon, so that a program that forgot `close` does not hang at its end; and it is
never inside C code when the interpreter is torn down, because ending it is registered with
`weakref.finalize`, which runs at exit (and when the reader is dropped): the stop event ends a read
within one piece of it, then the thread is joined. While it has no job it holds no reference to
anything but its queue.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Generic, TypeVar

THREAD_NAME = "token-reader"

Result = TypeVar("Result")


class BackgroundReader(Generic[Result]):
    """Runs jobs in a thread named `token-reader`; the next may be given when the last has ended."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._stop = threading.Event()
        thread = threading.Thread(
            target=_run_jobs, args=(self._jobs, self._stop), name=THREAD_NAME, daemon=True
        )
        thread.start()
        self._end = weakref.finalize(self, _end_thread, self._jobs, self._stop, thread)

    def submit(self, work: Callable[[threading.Event], Result]) -> "Future[Result]":
        """Have the thread call `work` with its stop event; the result or the error is carried."""
        future: Future[Result] = Future()
        self._jobs.put((future, work))
        return future

    def abandon(self, future: "Future[Result]") -> None:
        """End a job early and wait until it has let go of what it was given."""
        self._stop.set()
        try:
            if not future.cancel():
                wait((future,))
        finally:
            self._stop.clear()

    def close(self) -> None:
        """End the running job and the thread; closing twice is allowed."""
        self._end()


_Job = tuple["Future", Callable[[threading.Event], object]]


def _run_jobs(jobs: "SimpleQueue[_Job | None]", stop: threading.Event) -> None:
    while (job := jobs.get()) is not None:
        future, work = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work(stop))
            except BaseException as error:  # noqa: BLE001 - carried to the thread that waits
                future.set_exception(error)
        del job, future, work


def _end_thread(
    jobs: "SimpleQueue[_Job | None]", stop: threading.Event, thread: threading.Thread
) -> None:
    stop.set()
    jobs.put(None)
    # The garbage collector may drop the last reference while it runs in that very thread.
    if thread is not threading.current_thread():
        thread.join()
