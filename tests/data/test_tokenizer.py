"""Text to ids: what is given, what is trained, and what may never come out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from corpora import document, pseudo_text, word_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from atoll.config.data import TokenizerConfig
from atoll.data.cache import Probe
from atoll.data.tokenizer import Tokenizer
from atoll.data.tokenizer_files import fetch_from_hub, open_tokenizer
from atoll.data.tokenizer_training import byte_alphabet, sample_texts, train_tokenizer
from atoll.errors import CacheError, ConfigError, DataError, UnavailableError

TEXTS = [pseudo_text(seed, 400) for seed in range(12)]


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(TEXTS, vocab_size=500)


def word_bytes(count=10, **options):
    return json.dumps(word_tokenizer(count, **options)).encode()


# Trained


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=200)
def test_any_text_comes_back_from_its_ids(trained, text):
    assert trained.decode(trained.encode(text)) == text


def test_a_vocabulary_of_256_holds_every_byte_of_text_and_both_specials():
    tokenizer = train_tokenizer(TEXTS, vocab_size=256)
    assert tokenizer.vocab_size <= 256
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    text = "".join(map(chr, [*range(0x300), 0x4E2D, 0xFFFD, 0x1F642, 0x10FFFF]))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_byte_alphabet_is_that_of_the_library_without_bytes_that_text_never_holds():
    assert set(byte_alphabet()) < set(pre_tokenizers.ByteLevel.alphabet())
    used = {
        byte
        for code in range(0x110000)
        if not 0xD800 <= code < 0xE000
        for byte in chr(code).encode()
    }
    assert len(byte_alphabet()) == len(used) == 243


def test_training_gives_the_same_bytes_in_another_process_with_another_number_of_threads(trained):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from corpora import pseudo_text\n"
        "from atoll.data.tokenizer_training import train_tokenizer\n"
        "texts = [pseudo_text(seed, 400) for seed in range(12)]\n"
        "print(train_tokenizer(texts, vocab_size=500).sha256)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        env={**os.environ, "RAYON_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == trained.sha256


def test_nothing_to_train_on_is_an_error():
    with pytest.raises(DataError, match="no training document to train a tokenizer on"):
        train_tokenizer([], vocab_size=300)


documents_to_sample = st.lists(
    st.tuples(st.binary(min_size=16, max_size=16), st.integers(1, 40)), max_size=25
)


@given(documents_to_sample, st.integers(1, 200), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=200)
def test_the_sample_is_the_smallest_digests_that_fit_in_any_order(found, max_bytes, draw):
    longest = max(1, max_bytes)
    documents = [document("x" * min(size, longest), digest) for digest, size in found]
    expected, total, seen = [], 0, {}
    for item in documents:
        seen.setdefault(item.digest, item)
    for digest in sorted(seen):
        total += seen[digest].text_bytes
        if total > max_bytes:
            break
        expected.append(seen[digest].text)
    again = [seen[digest] for digest in seen]
    draw.shuffle(again)
    assert sample_texts(documents, max_bytes=max_bytes) == expected
    assert sample_texts(again, max_bytes=max_bytes) == expected


def test_of_a_document_longer_than_the_sample_its_head_is_taken_whole_characters_only():
    assert sample_texts([document("é" * 10)], max_bytes=5) == ["éé"]


# Specials


def test_text_that_spells_a_special_token_is_encoded_letter_by_letter(trained):
    ids = trained.encode("a<|end_of_text|>b")
    assert trained.eos_id not in ids
    assert trained.decode(ids) == "a<|end_of_text|>b"


def test_a_post_processor_of_its_own_adds_nothing():
    tokenizer = Tokenizer(word_bytes(bos=True))
    assert tokenizer.native.encode("w3 w4").ids == [1, 3, 4, 2]
    assert tokenizer.encode("w3 w4") == [3, 4]


def test_padding_and_truncation_of_a_given_tokenizer_are_off():
    facts = word_tokenizer(10)
    facts["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0}
    facts["truncation"]["direction"] = "Right"
    facts["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<unk>",
    }
    assert Tokenizer(json.dumps(facts).encode()).encode("w3 w4 w5") == [3, 4, 5]


def test_the_vocabulary_reaches_to_the_largest_id_even_where_ids_are_missing():
    facts = word_tokenizer(10)
    facts["model"]["vocab"]["far"] = 70_000
    assert Tokenizer(json.dumps(facts).encode()).vocab_size == 70_001


def test_a_tokenizer_that_drops_merges_at_random_is_refused():
    facts = json.loads(train_tokenizer(TEXTS[:1], vocab_size=260).content)
    facts["model"]["dropout"] = 0.1
    with pytest.raises(DataError, match="drops merges at random"):
        Tokenizer(json.dumps(facts).encode())


def test_a_file_that_is_no_tokenizer_is_refused():
    with pytest.raises(DataError, match="cannot be read by tokenizers"):
        Tokenizer(b'{"model": 3}')


# Given


def folder_with(tmp_path, *, tokenizer=None, **files):
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(tokenizer or word_bytes())
    for name, facts in files.items():
        (folder / f"{name}.json").write_text(json.dumps(facts))
    return str(folder)


@pytest.mark.parametrize("entry", ["w5", {"content": "w5", "special": True}])
@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_beginning_and_end_come_from_the_files_beside_a_tokenizer(tmp_path, entry, file):
    path = folder_with(tmp_path, **{file: {"eos_token": entry, "bos_token": "w6"}})
    tokenizer = open_tokenizer(TokenizerConfig(path=path))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (6, 5)


def test_a_named_token_goes_before_the_files(tmp_path):
    path = folder_with(tmp_path, tokenizer_config={"eos_token": "w5"})
    assert open_tokenizer(TokenizerConfig(path=path, eos_token="w7")).eos_id == 7


def test_a_well_known_spelling_is_taken_where_nothing_names_a_token(words):
    tokenizer = open_tokenizer(TokenizerConfig(path=words(10)))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)


def bare_tokenizer(tmp_path):
    facts = word_tokenizer(10)
    facts["model"]["vocab"] = {f"w{id}": id for id in range(10)}
    facts["added_tokens"] = []
    facts["model"]["unk_token"] = "w0"
    return folder_with(tmp_path, tokenizer=json.dumps(facts).encode())


@pytest.mark.parametrize("kind", ["bos", "eos"])
def test_a_token_to_be_added_that_is_not_there_is_an_error_with_both_remedies(tmp_path, kind):
    path = bare_tokenizer(tmp_path)
    flags = {"add_bos": kind == "bos", "add_eos": kind == "eos"}
    with pytest.raises(
        ConfigError, match=rf"data\.tokenizer\.add_{kind} is true, but .* no {kind}"
    ) as caught:
        open_tokenizer(TokenizerConfig(path=path, **flags))
    assert f"data.tokenizer.{kind}_token" in (caught.value.hint or "")
    assert open_tokenizer(TokenizerConfig(path=path, add_bos=False, add_eos=False)).eos_id is None


def test_a_named_token_that_is_not_there_is_an_error(words):
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.eos_token is 'w99', which"):
        open_tokenizer(TokenizerConfig(path=words(10), eos_token="w99"))


def test_a_folder_without_tokenizer_json_says_how_to_make_one(tmp_path):
    with pytest.raises(DataError, match=r"holds no tokenizer\.json") as caught:
        open_tokenizer(TokenizerConfig(path=str(tmp_path)))
    assert "save_pretrained" in (caught.value.hint or "")


def test_a_hub_tokenizer_is_fetched_at_its_revision(tmp_path, words):
    asked = []

    def fetch(repository, revision, name):
        asked.append((repository, revision, name))
        if name == "special_tokens_map.json":
            return None
        path = tmp_path / f"fetched-{name}"
        path.write_bytes(word_bytes() if name == "tokenizer.json" else b'{"eos_token": "w9"}')
        return path

    config = TokenizerConfig(path="hub:someone/words", revision="v1")
    assert open_tokenizer(config, fetch=fetch).eos_id == 9
    assert {(repository, revision) for repository, revision, _ in asked} == {
        ("someone/words", "v1")
    }


def test_a_hub_tokenizer_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnavailableError, match="needs the package huggingface_hub") as caught:
        fetch_from_hub("someone/words", "v1", "tokenizer.json")
    assert caught.value.hint == "pip install 'atoll[hub]'"


# Drift


def test_probes_that_encode_as_before_pass_and_others_name_text_and_versions(trained):
    probes = trained.probes()
    trained.check_probes(probes, made_with="0.1")
    drifted = [*probes[:-1], Probe(text=probes[-1].text, ids=[1, *probes[-1].ids])]
    with pytest.raises(CacheError, match=r"now encodes .*made with tokenizers 0\.1") as caught:
        trained.check_probes(drifted, made_with="0.1")
    assert "tokenizers==0.1" in (caught.value.hint or "")
