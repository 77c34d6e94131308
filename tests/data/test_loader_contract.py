"""Laws that every Loader keeps. A new loader joins by a line in MAKERS.

Each maker takes a folder, a number of passes over its data and whether to prefetch, and returns a
loader with a few dozen rows at least.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.data.batch import IGNORE, Batch, Loader
from atoll.data.cache import Cache
from atoll.data.cachewriter import write_cache
from atoll.data.device import DevicePlacement
from atoll.data.loader import TokenLoader
from atoll.errors import AtollError

Maker = Callable[..., Loader]


def token_loader(split: str, *, placement: str = "pageable", dtype: str = "uint32") -> Maker:
    def make(folder: Path, *, passes: int = 1, prefetch: bool = True) -> TokenLoader:
        ids = np.random.default_rng(5).integers(0, 60_000, 1007)
        if not (folder / "manifest.json").exists():
            write_cache(
                folder, train=ids, validation=ids, shard_tokens=96, vocab_size=60_000, dtype=dtype
            )
        return TokenLoader(
            Cache(folder),
            split,
            context_length=10,
            seed=3,
            group_shards=2,
            passes=passes,
            prefetch=prefetch,
            placement=DevicePlacement(torch.device("cpu")) if placement == "device" else placement,
        )

    return make


MAKERS = {
    "train-pageable": token_loader("train"),
    "train-device": token_loader("train", placement="device", dtype="uint16"),
    "validation-pageable": token_loader("validation", dtype="uint16"),
    "validation-device": token_loader("validation", placement="device"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("contract")


@pytest.fixture(params=MAKERS, ids=str)
def make(request, folder) -> Maker:
    def make_in_folder(**options) -> Loader:
        return MAKERS[request.param](folder / request.param, **options)

    make_in_folder.takes_passes = "validation" not in request.param
    return make_in_folder


def columns(batch: Batch) -> dict[str, torch.Tensor]:
    """Return the tensors that a batch has, by field name."""
    names = ("inputs_BT", "targets_BT", "weights_BT", "positions_BT", "documents_BT")
    return {name: value for name in names if (value := getattr(batch, name)) is not None}


def joined(batches: list[Batch]) -> dict[str, torch.Tensor]:
    parts = [columns(batch) for batch in batches]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def all_rows(loader: Loader) -> dict[str, torch.Tensor]:
    return joined([loader.batch(cursor, 1) for cursor in range(loader.num_rows)])


def test_a_batch_is_the_rows_of_its_cursors_one_by_one(make):
    loader = make()
    whole = all_rows(loader)
    for cursor, rows in [(0, 1), (0, 7), (5, 23), (17, 40), (0, loader.num_rows)]:
        part = {name: tensor[cursor : cursor + rows] for name, tensor in whole.items()}
        assert_same(columns(loader.batch(cursor, rows)), part)
    loader.close()


def test_batch_sizes_may_vary_without_changing_the_rows(make):
    loader = make()
    sizes = np.random.default_rng(0).integers(1, 9, loader.num_rows).tolist()
    batches, cursor = [], 0
    for rows in sizes:
        rows = min(rows, loader.num_rows - cursor)
        if rows:
            batches.append(loader.batch(cursor, rows))
            cursor += rows
    assert_same(joined(batches), all_rows(loader))
    loader.close()


def test_rows_do_not_depend_on_how_a_cursor_is_reached(make):
    loader = make()
    whole = all_rows(loader)
    for cursor in np.random.default_rng(1).permutation(loader.num_rows).tolist():
        one = {name: tensor[cursor : cursor + 1] for name, tensor in whole.items()}
        assert_same(columns(loader.batch(cursor, 1)), one)
    loader.close()


def test_one_integer_resumes_a_new_loader_anywhere(make):
    loader = make()
    whole = all_rows(loader)
    loader.close()
    for cursor in range(0, loader.num_rows, 7):
        resumed = make()
        rows = min(12, loader.num_rows - cursor)
        part = {name: tensor[cursor : cursor + rows] for name, tensor in whole.items()}
        assert_same(columns(resumed.batch(cursor, rows)), part)
        resumed.close()


def test_prefetch_changes_no_row(make):
    with_prefetch, without = make(prefetch=True), make(prefetch=False)
    assert_same(all_rows(with_prefetch), all_rows(without))
    with_prefetch.close()
    without.close()


def test_a_shorter_run_is_an_exact_prefix_of_a_longer_one(make):
    if not make.takes_passes:
        pytest.skip("read once by definition")
    short, long = make(passes=1), make(passes=3)
    rows = all_rows(long)
    assert long.num_rows == 3 * short.num_rows
    assert_same(all_rows(short), {name: t[: short.num_rows] for name, t in rows.items()})
    assert short.identity == long.identity
    short.close()
    long.close()


def test_the_weight_of_rows_is_known_without_reading_them(make):
    loader = make()
    for cursor, rows in [(0, 1), (3, 30), (loader.num_rows - 1, 1), (0, loader.num_rows)]:
        batch = loader.batch(cursor, rows)
        counted = batch.targets_BT != IGNORE
        weights = counted.float() if batch.weights_BT is None else batch.weights_BT * counted
        assert loader.weight(cursor, rows) == weights.double().sum().item()
    loader.close()


def test_a_batch_is_never_changed_by_later_ones(make):
    loader = make()
    batches = [loader.batch(cursor, 1) for cursor in range(loader.num_rows)]
    copies = [{name: t.clone() for name, t in columns(batch).items()} for batch in batches]
    for _ in range(2):
        all_rows(loader)
    for batch, copy in zip(batches, copies, strict=True):
        assert_same(columns(batch), copy)
    loader.close()


def test_batches_have_the_types_they_promise(make):
    loader = make()
    batch = loader.batch(0, 4)
    assert batch.inputs_BT.dtype == batch.targets_BT.dtype == torch.int64
    assert batch.inputs_BT.shape == batch.targets_BT.shape
    assert len(batch.inputs_BT) == 4
    loader.close()


def test_rows_beyond_the_last_are_an_error(make):
    loader = make()
    with pytest.raises(AtollError, match="missing"):
        loader.batch(loader.num_rows, 1)
    with pytest.raises(AtollError, match="missing"):
        loader.weight(loader.num_rows, 1)
    loader.close()


@pytest.mark.parametrize(("cursor", "rows"), [(-1, 2), (0, 0), (3, -1)])
def test_requests_that_name_no_rows_are_an_error(make, cursor, rows):
    loader = make()
    with pytest.raises(AtollError, match="rows from cursor"):
        loader.batch(cursor, rows)
    loader.close()


def test_closing_twice_is_allowed_and_ends_reading(make):
    loader = make()
    loader.batch(0, 1)
    loader.close()
    loader.close()
    with pytest.raises(AtollError, match="closed"):
        loader.batch(0, 1)


def test_an_identity_is_a_digest_and_stable(make):
    first, second = make(), make(prefetch=False)
    assert first.identity == second.identity
    assert len(bytes.fromhex(first.identity)) == 32
    first.close()
    second.close()
