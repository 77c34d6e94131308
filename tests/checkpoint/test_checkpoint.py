"""Saving, loading, damage, retention and comparison of checkpoints."""

import json
import multiprocessing
import signal
import sys

import pytest
import torch

from atoll import faults
from atoll.checkpoint.compare import compare
from atoll.checkpoint.load import list_checkpoints, load_checkpoint, load_newest
from atoll.checkpoint.retain import retain
from atoll.checkpoint.save import save_checkpoint
from atoll.checkpoint.verify import verify_checkpoint
from atoll.errors import CheckpointError, StorageError, UsageError
from atoll.files import sha256_file
from atoll.tensors import Snapshot, parameter_digest

FAILPOINTS = [
    *(f"checkpoint.tensors.{at}" for at in ("before_fsync", "before_rename", "after_rename")),
    "checkpoint.tensors.after_read_back",
    *(f"checkpoint.receipt.{at}" for at in ("before_fsync", "before_rename", "after_rename")),
    *(f"checkpoint.manifest.draft.{at}" for at in ("before_fsync", "before_rename")),
    "checkpoint.manifest.before_rename",
    "checkpoint.manifest.after_rename",
]


def state(step: int) -> Snapshot:
    generator = torch.Generator().manual_seed(step)
    return Snapshot(
        {
            "model.embed": torch.randn(400, 1000, generator=generator),
            "optimizer.exp_avg": torch.randn(1, 50, generator=generator),
            "generator.torch": torch.arange(5, dtype=torch.uint8),
        },
        {"step": step, "cursor": 8 * step},
    )


def save(folder, step: int):
    return save_checkpoint(
        folder, state(step), step=step, binding={"threads": 2}, run={"config": {"a": {"b": step}}}
    )


def assert_same(found: Snapshot, wanted: Snapshot) -> None:
    assert found.facts == wanted.facts
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


def save_with_fault(folder, step: int, specification: str) -> None:
    faults.arm(specification)
    save(folder, step)


def test_loading_gives_back_the_newest_state(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    found = load_newest(tmp_path)
    assert found is not None
    assert_same(found.snapshot, state(2))
    assert found.binding == {"threads": 2}
    assert found.manifest.run == {"config": {"a": {"b": 2}}}


def test_files_have_the_group_form(tmp_path):
    folder = save(tmp_path, 64)
    assert folder.name == "step-00000064"
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "rank-000.json",
        "rank-000.safetensors",
    ]


def test_manifests_form_a_chain(tmp_path):
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    previous = json.loads((second / "manifest.json").read_bytes())["previous"]
    assert previous == {
        "folder": first.name,
        "manifest_sha256": sha256_file(first / "manifest.json"),
    }


def test_parameter_digest_names_the_weights_alone(tmp_path):
    folder = save(tmp_path, 1)
    wanted = parameter_digest({"embed": state(1).tensors["model.embed"]})
    assert load_checkpoint(folder).manifest.parameter_digest == wanted


def test_nothing_saved_is_no_error(tmp_path):
    assert load_newest(tmp_path / "checkpoints") is None


def test_a_step_is_never_saved_twice(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="never written twice"):
        save(tmp_path, 1)


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL is a POSIX signal")
@pytest.mark.parametrize("place", FAILPOINTS)
def test_process_killed_while_saving_leaves_the_previous_or_the_new_state(tmp_path, place):
    save(tmp_path, 1)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "atoll.checkpoint.save"])
    process = context.Process(target=save_with_fault, args=(tmp_path, 2, f"{place}=kill"))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    found = load_newest(tmp_path)
    assert found is not None
    survived = 2 if place == "checkpoint.manifest.after_rename" else 1
    assert_same(found.snapshot, state(survived))
    if survived == 1:
        assert (tmp_path / "aside" / "step-00000002-1").is_dir()
        save(tmp_path, 2)
    assert_same(load_checkpoint(tmp_path / "step-00000002").snapshot, state(2))


@pytest.mark.parametrize("place", FAILPOINTS)
def test_full_disk_while_saving_keeps_the_previous_state(tmp_path, place):
    save(tmp_path, 1)
    faults.arm(f"{place}=enospc")
    with pytest.raises(StorageError, match="No space left"):
        save(tmp_path, 2)
    faults.disarm()
    found = load_newest(tmp_path)
    assert found is not None
    assert_same(found.snapshot, state(2 if place == "checkpoint.manifest.after_rename" else 1))


def test_first_save_killed_leaves_no_checkpoint_and_is_put_aside(tmp_path):
    faults.arm("checkpoint.receipt.before_rename=raise")
    with pytest.raises(faults.InjectedFault):
        save(tmp_path, 1)
    assert load_newest(tmp_path) is None
    assert (tmp_path / "aside" / "step-00000001-1" / "rank-000.safetensors").is_file()


def flip(path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def test_flipped_bit_is_named_by_file_tensor_and_mib(tmp_path):
    folder = save(tmp_path, 1)
    path = folder / "rank-000.safetensors"
    # model.embed is the first of the float32 tensors: 1.6 MB, so its last byte lies in MiB 1.
    header = int.from_bytes(path.read_bytes()[:8], "little")
    flip(path, 8 + header + 1_599_999)
    (damage,) = verify_checkpoint(folder)
    assert (damage.file, damage.tensor, damage.mib) == (path, "model.embed", 1)
    assert "model.embed is damaged in MiB 1 of 2" in str(damage)
    with pytest.raises(CheckpointError, match=r"model\.embed is damaged in MiB 1"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["manifest.json", "rank-000.json", "rank-000.safetensors"])
def test_any_flipped_bit_is_found_in_the_file_it_is_in(tmp_path, name):
    folder = save(tmp_path, 1)
    path = folder / name
    sound = path.read_bytes()
    for place in range(0, len(sound), max(1, len(sound) // 40)):
        flip(path, place)
        assert {damage.file for damage in verify_checkpoint(folder)} == {path}, place
        path.write_bytes(sound)
    assert verify_checkpoint(folder) == []


@pytest.mark.parametrize("name", ["rank-000.json", "rank-000.safetensors"])
def test_missing_file_is_named(tmp_path, name):
    folder = save(tmp_path, 1)
    (folder / name).unlink()
    assert [damage.file.name for damage in verify_checkpoint(folder)] == [name]


def test_truncated_tensors_are_named(tmp_path):
    folder = save(tmp_path, 1)
    path = folder / "rank-000.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    (damage,) = verify_checkpoint(folder)
    assert damage.file == path
    assert "bytes" in damage.problem


def test_exchanged_predecessor_is_found(tmp_path):
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    (first / "manifest.json").unlink()
    other = save(tmp_path / "other", 1)
    (first / "manifest.json").write_bytes((other / "manifest.json").read_bytes() + b" ")
    assert [damage.file for damage in verify_checkpoint(second)] == [first / "manifest.json"]


def test_damaged_newest_is_put_aside_for_the_one_before(tmp_path, caplog):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    flip(newest / "rank-000.safetensors", 3000)
    found = load_newest(tmp_path)
    assert found is not None
    assert found.manifest.step == 1
    assert not newest.exists()
    assert (tmp_path / "aside" / "step-00000002-1" / "manifest.json").is_file()


def test_when_nothing_verifies_each_damage_is_told_and_nothing_moves(tmp_path):
    folders = [save(tmp_path, 1), save(tmp_path, 2)]
    for folder in folders:
        flip(folder / "rank-000.safetensors", 3000)
    with pytest.raises(CheckpointError) as raised:
        load_newest(tmp_path)
    assert all(folder.name in raised.value.message for folder in folders)
    assert all(folder.is_dir() for folder in folders)


def test_other_format_version_is_refused_with_a_hint(tmp_path):
    folder = save(tmp_path, 1)
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(
        text.replace('"format_version": 1', '"format_version": 9')
    )
    with pytest.raises(CheckpointError, match="format version 9; this atoll reads 1") as raised:
        load_checkpoint(folder)
    assert raised.value.hint


def test_retention_keeps_the_newest(tmp_path):
    folders = [save(tmp_path, step) for step in (1, 2, 3, 4)]
    assert retain(tmp_path, keep=2) == folders[:2]
    assert [listed.step for listed in list_checkpoints(tmp_path)] == [3, 4]
    assert verify_checkpoint(folders[3]) == []


def test_retention_never_removes_the_newest_that_verifies(tmp_path):
    folders = [save(tmp_path, step) for step in (1, 2, 3, 4)]
    for folder in folders[2:]:
        flip(folder / "rank-000.safetensors", 3000)
    assert retain(tmp_path, keep=1) == folders[:1]
    assert [listed.step for listed in list_checkpoints(tmp_path)] == [2, 3, 4]


def test_retention_leaves_folders_without_a_manifest_alone(tmp_path):
    (tmp_path / "step-00000000").mkdir()
    save(tmp_path, 1)
    save(tmp_path, 2)
    retain(tmp_path, keep=1)
    assert [listed.step for listed in list_checkpoints(tmp_path)] == [0, 2]


def test_equal_checkpoints_compare_equal(tmp_path):
    found = compare(save(tmp_path / "a", 1), save(tmp_path / "b", 1))
    assert found.equal
    assert (found.tensors_compared, found.scalars_compared) == (3, 3)


def test_comparison_lists_every_tensor_and_scalar_that_differs(tmp_path):
    other = state(1)
    other.tensors["model.embed"][399, 0] += 0.5
    other.facts["cursor"] = 9
    b = save_checkpoint(tmp_path / "b", other, step=1, binding={"threads": 4}, run={})
    found = compare(save(tmp_path / "a", 1), b)
    (difference,) = found.tensors
    assert (difference.name, difference.elements, difference.first_mib) == ("model.embed", 1, 1)
    assert difference.max_abs == pytest.approx(0.5, rel=1e-6)  # rounding of one FP32 sum
    assert found.scalars == ["binding.threads: 2 -> 4", "state.cursor: 8 -> 9"]


def test_foreign_safetensors_folders_compare(tmp_path):
    from safetensors.torch import save_file

    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.full((3,), value)}, tmp_path / name / "model.safetensors")
    save_file({"extra": torch.ones(1)}, tmp_path / "c" / "more.safetensors")
    assert compare(tmp_path / "a", tmp_path / "b").equal
    found = compare(tmp_path / "a", tmp_path / "c")
    assert [(d.name, d.reason) for d in found.tensors] == [
        ("extra", "only in the second"),
        ("w", "3 of 3 elements differ"),
    ]


def test_comparing_a_folder_without_tensors_is_the_users_mistake(tmp_path):
    with pytest.raises(UsageError, match="neither a checkpoint nor a safetensors file"):
        compare(tmp_path, tmp_path)


def test_negative_zero_and_zero_are_different_bits(tmp_path):
    from safetensors.torch import save_file

    save_file({"w": torch.tensor([0.0])}, tmp_path / "a.safetensors")
    save_file({"w": torch.tensor([-0.0])}, tmp_path / "b.safetensors")
    (difference,) = compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors").tensors
    assert difference.max_abs == 0.0
