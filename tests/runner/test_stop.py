"""Signals: the first asks for a stop, the second ends the process."""

import signal
import subprocess
import sys
import threading

import pytest

from atoll.runner.stop import StopRequest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested
        assert stop.reason == signal.Signals(number).name
    assert signal.getsignal(number) == before


def test_second_signal_ends_the_process_at_once():
    program = (
        "import signal\n"
        "from atoll.runner.stop import StopRequest\n"
        "with StopRequest():\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('finishing', flush=True)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('never', flush=True)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 130
    assert found.stdout == "finishing\n"


def test_a_caller_may_ask_and_the_first_reason_stays():
    stop = StopRequest()
    stop.ask("lease lost")
    stop.ask("later")
    assert stop.reason == "lease lost"


def test_outside_the_main_thread_handlers_are_left_alone():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with StopRequest():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
