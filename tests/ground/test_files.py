"""Durable writes, canonical JSON, digests and folder locks."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll import faults, files
from atoll.errors import AtollError, LockedError, StorageError

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(autouse=True)
def _no_failpoints():
    yield
    faults.disarm()


@given(JSON)
def test_canonical_json_reads_back_as_the_same_value(value):
    assert json.loads(files.canonical_json(value)) == value


@given(st.dictionaries(st.text(), st.integers(), max_size=6))
def test_identity_does_not_depend_on_the_order_of_keys(mapping):
    assert files.identity(mapping) == files.identity(dict(reversed(mapping.items())))


def test_canonical_json_refuses_nan():
    with pytest.raises(ValueError, match="Out of range"):
        files.canonical_json(float("nan"))


def test_file_digest_equals_the_digest_of_its_bytes(tmp_path):
    data = os.urandom(9 * files.MIB + 17)
    (tmp_path / "x").write_bytes(data)
    assert files.sha256_file(tmp_path / "x") == hashlib.sha256(data).hexdigest()


def test_failed_write_keeps_the_old_content_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "facts.json"
    files.write_bytes(path, b"old")
    faults.arm("file.before_rename=raise")
    with pytest.raises(faults.InjectedFault):
        files.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["facts.json"]


def test_full_disk_is_said_with_its_remedy_and_leaves_no_temporary_file(tmp_path):
    faults.arm("file.before_fsync=enospc")
    with pytest.raises(StorageError, match="No space left") as caught:
        files.write_bytes(tmp_path / "x", b"data")
    assert "free space" in (caught.value.hint or "")
    assert caught.value.exit_code == 1
    assert os.listdir(tmp_path) == []


def test_read_only_file_system_is_said_with_its_remedy():
    error = files.storage_error(OSError(errno.EROFS, "Read-only file system"), Path("/x"))
    assert "Read-only" in error.message
    assert "choose another folder" in (error.hint or "")


KILLED_WRITER = """
import sys
from pathlib import Path
from atoll import faults, files
faults.arm(sys.argv[2] + "=kill")
files.write_bytes(Path(sys.argv[1]), b"new")
"""


@pytest.mark.parametrize(
    ("failpoint", "content"),
    [("file.before_fsync", b"old"), ("file.before_rename", b"old"), ("file.after_rename", b"new")],
)
def test_kill_leaves_the_old_or_the_new_file_whole(tmp_path, failpoint, content):
    path = tmp_path / "x"
    files.write_bytes(path, b"old")
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(path), failpoint], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == content


def test_second_process_is_refused_while_the_first_holds_the_folder(tmp_path):
    program = (
        "import sys; from pathlib import Path; from atoll.files import folder_lock\n"
        "with folder_lock(Path(sys.argv[1])): pass"
    )
    with files.folder_lock(tmp_path):
        held = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
    free = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert f"in use by another process (pid {os.getpid()})" in held.stderr
    assert free.returncode == 0


def test_lock_held_twice_names_the_remedy(tmp_path):
    with (
        files.folder_lock(tmp_path),
        pytest.raises(LockedError, match="in use") as caught,
        files.folder_lock(tmp_path),
    ):
        pass
    assert "another folder" in (caught.value.hint or "")
    assert caught.value.exit_code == 2


def test_damaged_json_is_named_with_its_place(tmp_path):
    (tmp_path / "facts.json").write_text('{"a": ')
    with pytest.raises(AtollError, match=r"facts\.json is not valid JSON: .*line 1"):
        files.read_json(tmp_path / "facts.json")
