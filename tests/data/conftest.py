"""Corpora and caches that the tests of this room share."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.config.data import DataConfig
from atoll.config.model import ModelConfig
from atoll.data.pace import Pace
from atoll.data.prepare import prepare

sys.path.insert(0, str(Path(__file__).parent))

from corpora import SMALL_PACE, word_tokenizer


@pytest.fixture
def words(tmp_path):
    """Write a word tokenizer and return its path."""

    def write(count: int, *, bos: bool = False) -> str:
        path = tmp_path / f"words-{count}-{bos}.json"
        path.write_text(json.dumps(word_tokenizer(count, bos=bos)))
        return str(path)

    return write


@pytest.fixture
def text_file(tmp_path):
    """Write a file of the corpus and return its path."""

    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.fixture
def make(tmp_path):
    """Prepare a cache below the test's folder, at the small pace."""

    def call(source, *, vocab_size=65_536, outside=None, pace=None, progress=None, **data):
        section = DataConfig.model_validate(
            {"cache_dir": tmp_path / "caches", "source": source, "prepare_workers": 1} | data
        )
        return prepare(
            section,
            ModelConfig(vocab_size=vocab_size),
            outside=outside,
            pace=Pace(**(SMALL_PACE | (pace or {}))),
            progress=progress,
        )

    return call


@pytest.fixture(scope="session")
def preparing():
    """Ask a process of its own to prepare; see prepare_server.py for what goes in and out."""
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("prepare_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def call(**request):
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    yield call
    server.stdin.close()
    server.stdout.close()
    server.wait()
