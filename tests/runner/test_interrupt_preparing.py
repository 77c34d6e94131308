"""A signal while a run or the demo prepares its cache ends like `atoll prepare`."""

import os
import signal
import subprocess
import sys

import pytest

WORDS = (
    "preparing was interrupted by {}; finished work is kept.\n\n"
    "hint: run the same command again to go on\n"
)
STOP_WHILE_PREPARING = """
import signal
from atoll.cli.main import main
from atoll.data import prepare
prepare.prepare = lambda *_, **named: signal.raise_signal(signal.{})
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("verb", ["train", "demo"])
def test_signal_while_preparing_exits_130_and_says_what_is_kept(tmp_path, verb, name):
    done = subprocess.run(
        [sys.executable, "-c", STOP_WHILE_PREPARING.format(name), verb],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.endswith(WORDS.format(name))


def test_a_run_listens_again_after_preparing(recipe, cache_path, monkeypatch):
    from atoll.data.cache import Cache
    from atoll.runner import build
    from atoll.runner.progress import Silence
    from atoll.runner.stop import StopRequest

    monkeypatch.setattr("atoll.data.prepare.prepare", lambda *_, **named: Cache(cache_path))
    config = recipe(data={"cache_path": None})
    monkeypatch.setattr(build, "cache_folder", lambda _: cache_path / "missing")
    with StopRequest() as stop:
        build.open_or_prepare(config, Silence())
        signal.raise_signal(signal.SIGTERM)
        assert stop.reason == "SIGTERM"
