"""Hub data sets through a stand-in for the hub: no network is needed or used."""

import sys

import pytest

from atoll.config.data import SourceConfig
from atoll.data.hub import HubRows, open_data_set
from atoll.data.prepare import Outside
from atoll.errors import DataError, UnavailableError
from atoll.faults import InjectedFault, arm, disarm

SOURCE = {"path": "hub:someone/rows", "revision": "main", "split": "test"}


class Hub:
    """A hub with one data set; remembers what it was asked for."""

    def __init__(self, rows, commit="c0ffee"):
        self.rows, self.commit, self.asked = rows, commit, []

    def open(self, source, skip_rows):
        self.asked.append((source.path, source.revision, source.split, skip_rows))
        return HubRows(self.commit, iter(self.rows[skip_rows:]))

    @property
    def outside(self):
        return Outside(open_hub=self.open)


ROWS = [{"text": f"w{number % 50 + 3} w{number // 50 + 3}", "id": number} for number in range(95)]


def test_a_data_set_becomes_a_source_with_the_commit_of_its_revision(make, words):
    hub = Hub(ROWS)
    cache = make(SOURCE, tokenizer=words(60), outside=hub.outside, shuffle_buffer=1)
    (source,) = cache.manifest.sources
    assert (source.name, source.revision, source.records) == ("hub:someone/rows", "c0ffee", 95)
    assert hub.asked == [("hub:someone/rows", "main", "test", 0)]
    assert sum(split.documents for split in cache.manifest.splits.values()) == 95
    assert not (cache.folder / "work").exists()


def test_a_finished_cache_does_not_ask_the_hub_again(make, words):
    hub = Hub(ROWS)
    first = make(SOURCE, tokenizer=words(60), outside=hub.outside)
    second = make(SOURCE, tokenizer=words(60), outside=hub.outside)
    assert first.manifest == second.manifest
    assert len(hub.asked) == 1


def test_a_copy_goes_on_after_the_rows_that_are_durable(make, words):
    hub = Hub(ROWS)
    arm("prepare.hub:3=raise")
    with pytest.raises(InjectedFault):
        make(SOURCE, tokenizer=words(60), outside=hub.outside)
    disarm()
    cache = make(SOURCE, tokenizer=words(60), outside=hub.outside)
    assert [skip for *_, skip in hub.asked] == [0, 30]
    assert cache.manifest.sources[0].records == 95


def test_a_revision_that_moved_while_copying_is_an_error(make, words):
    arm("prepare.hub:1=raise")
    with pytest.raises(InjectedFault):
        make(SOURCE, tokenizer=words(60), outside=Hub(ROWS).outside)
    disarm()
    with pytest.raises(DataError, match=r"was commit c0ffee .* and is dead now") as caught:
        make(SOURCE, tokenizer=words(60), outside=Hub(ROWS, commit="dead").outside)
    assert "set its revision to a commit" in (caught.value.hint or "")


def test_rows_without_text_are_counted_like_those_of_files(make, words):
    rows = [*ROWS, {"id": 1}, {"text": None}, {"text": b"bytes"}, {"text": "half \ud800 w3"}]
    cache = make(SOURCE, tokenizer=words(60), outside=Hub(rows).outside, on_bad_record="skip")
    ledger = {kind: entry.count for kind, entry in cache.manifest.ledger.items()}
    assert ledger == {
        "missing_field": 2,
        "non_string_field": 1,
        "lone_surrogate": 1,
        "unknown_token": 1,
    }


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    source = SourceConfig.model_validate(SOURCE)
    with pytest.raises(UnavailableError, match="needs the package datasets") as caught:
        open_data_set(source, 0)
    assert (caught.value.exit_code, caught.value.hint) == (2, "pip install 'atoll[hub]'")


def test_a_hub_that_does_not_answer_is_an_error_with_name_and_revision(make, words):
    def broken(source, skip_rows):
        def rows():
            yield {"text": "w3"}
            raise DataError(f"cannot read {source.path} (revision {source.revision})")

        return HubRows("c0ffee", rows())

    with pytest.raises(DataError, match=r"cannot read hub:someone/rows \(revision main\)"):
        make(SOURCE, tokenizer=words(60), outside=Outside(open_hub=broken))
