"""Exact duplicates against a naive twin, with many buckets and with one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.data.dedupe import DUPLICATE, IN_VALIDATION, KEPT, find_duplicates
from atoll.data.pace import Pace
from atoll.data.staging import STAGED

TRAIN, VALIDATION = 0, 1

rows_of_index = st.lists(st.tuples(st.integers(0, 12), st.sampled_from([0, 0, 0, 1])), max_size=80)


def index_of(rows):
    """Make index records; equal numbers stand for equal texts."""
    index = np.zeros(len(rows), STAGED)
    for place, (text, split) in enumerate(rows):
        # Texts that share one half of the digest are still different texts.
        index[place]["digest_high"] = text // 3
        index[place]["digest_low"] = text % 3
        index[place]["split"] = split
    return index


def naive_flags(rows):
    """Return the flags as one would write them down: first come, first kept; validation wins."""
    held_out = {text for text, split in rows if split == VALIDATION}
    seen, flags = set(), []
    for text, split in rows:
        if split == TRAIN and text in held_out:
            flags.append(IN_VALIDATION)
        else:
            flags.append(DUPLICATE if (text, split) in seen else KEPT)
            seen.add((text, split))
    return flags


@given(rows_of_index, st.sampled_from([1, 3, 1000]), st.sampled_from([1, 7, 1000]))
@settings(deadline=None, max_examples=150)
def test_duplicates_are_those_of_the_naive_twin(tmp_path_factory, rows, bucket_documents, chunk):
    work = tmp_path_factory.mktemp("dedupe")
    pace = Pace(bucket_documents=bucket_documents, rows=chunk)
    found = find_duplicates(index_of(rows), work, pace=pace)
    flags = naive_flags(rows)
    assert found.flags.tolist() == flags
    for flag in (DUPLICATE, IN_VALIDATION):
        assert found.counts[flag] == flags.count(flag)
        first = [place for place, value in enumerate(flags) if value == flag][:5]
        assert [row for row, _ in found.examples[flag]] == first
        for row, kept in found.examples[flag]:
            assert rows[row][0] == rows[kept][0]
            assert flags[kept] == KEPT
    assert not list(work.glob("bucket-*"))


@pytest.mark.parametrize("bucket_documents", [100, 10_000])
def test_a_large_index_of_one_text_keeps_the_first(tmp_path, bucket_documents):
    index = np.zeros(5_000, STAGED)
    found = find_duplicates(index, tmp_path, pace=Pace(bucket_documents=bucket_documents, rows=64))
    assert found.counts[DUPLICATE] == 4_999
    assert found.flags[0] == KEPT
