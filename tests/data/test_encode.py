"""Blocks of documents to ids: the same ids in pieces, in threads, and with specials added once."""

import json

import numpy as np
import pytest
from corpora import document, pseudo_text
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Native

from atoll.config.data import TokenizerConfig
from atoll.data import pieces
from atoll.data.blocks import Block
from atoll.data.encode import Encoder, encode_blocks
from atoll.data.pieces import can_cut, cut
from atoll.data.tokenizer import Tokenizer
from atoll.data.tokenizer_files import open_tokenizer
from atoll.data.tokenizer_training import train_tokenizer
from atoll.errors import DataError

TEXTS = [pseudo_text(seed, 400) for seed in range(12)]


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(TEXTS, vocab_size=500)


# Pieces of long documents

LLAMA3 = next(pattern for pattern in sorted(pieces._KNOWN_PATTERNS) if "{1,3}" in pattern)
QWEN2 = next(pattern for pattern in sorted(pieces._KNOWN_PATTERNS) if "{1,3}" not in pattern)


def with_pre_tokenizer(*parts):
    native = Native(models.BPE())
    made = {
        "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "letters": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        "digits": pre_tokenizers.Digits(individual_digits=True),
        "llama3": pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        "qwen2": pre_tokenizers.Split(Regex(QWEN2), "isolated"),
    }
    native.pre_tokenizer = pre_tokenizers.Sequence([made[part] for part in parts])
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    native.train_from_iterator([*TEXTS, "\n\n\n  \n\t\n" * 50, "''s're\n's" * 50], trainer)
    return Tokenizer(native.to_str().encode())


CUTTABLE = {
    parts: with_pre_tokenizer(*parts)
    for parts in (("bytes",), ("digits", "bytes"), ("llama3", "letters"), ("qwen2", "letters"))
}

lines = st.lists(
    st.text(st.sampled_from("ab1 \n\r\t\u2028\u0085\x1c'sé中.("), max_size=8)
    | st.sampled_from(["\n", "x\n", "1\n2", ".\n(", "a\n's", "  \n  b", "\r\nc"]),
    max_size=20,
).map("".join)


@pytest.mark.parametrize("parts", CUTTABLE, ids="+".join)
@given(text=lines)
@settings(deadline=None, max_examples=250)
def test_pieces_give_the_ids_of_the_whole_text(parts, text):
    tokenizer = CUTTABLE[parts]
    assert can_cut(tokenizer.content)
    found = cut(text, piece_chars=2)
    assert "".join(found) == text
    assert [id for ids in tokenizer.encode_batch(found) for id in ids] == tokenizer.encode(text)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Digits", "individual_digits": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
        {"added_tokens": [{"content": "\n\n", "special": False}]},
        {"added_tokens": [{"content": "x", "special": False, "rstrip": True}]},
    ],
)
def test_documents_of_other_tokenizers_are_not_cut(trained, change):
    assert can_cut(trained.content)
    assert not can_cut(json.dumps({**json.loads(trained.content), **change}).encode())


# Blocks


def encoder(tokenizer, **options):
    defaults = {"add_bos": False, "add_eos": True, "dtype": np.dtype("<u2"), "piece_bytes": 200}
    return Encoder(tokenizer, **{**defaults, **options})


def test_beginning_and_end_are_added_once_and_counted(words):
    tokenizer = open_tokenizer(TokenizerConfig(path=words(10, bos=True)))
    block = Block(documents=[document("w3 w4"), document("w5")])
    found = encoder(tokenizer, add_bos=True).encode(block)
    assert found.tokens.tolist() == [1, 3, 4, 2, 1, 5, 2]
    assert found.lengths.tolist() == [4, 3]


def test_a_text_without_ids_has_length_zero_and_unknown_ones_are_flagged(words):
    tokenizer = open_tokenizer(TokenizerConfig(path=words(10)))
    found = encoder(tokenizer).encode(Block(documents=[document("\t"), document("w3 nobody")]))
    assert found.lengths.tolist() == [0, 3]
    assert found.has_unknown.tolist() == [False, True]


def test_long_documents_give_the_ids_of_the_whole(trained):
    long, short = pseudo_text(99, 2000), "short\n"
    block = Block(documents=[document(short), document(long), document(short)])
    for name in (trained, Tokenizer(with_normalizer(trained), bos_id=0, eos_id=1)):
        expected = [id for text in (short, long, short) for id in [*name.encode(text), 1]]
        assert encoder(name).encode(block).tokens.tolist() == expected


def with_normalizer(tokenizer):
    return json.dumps({**json.loads(tokenizer.content), "normalizer": {"type": "NFC"}}).encode()


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_come_in_the_order_of_the_blocks(trained, workers):
    blocks = [
        Block(documents=[document(pseudo_text(seed, 1 + 37 * seed % 200))]) for seed in range(30)
    ]
    found = list(encode_blocks(iter(blocks), encoder(trained), workers=workers))
    assert [encoded.block for encoded in found] == blocks
    for encoded, block in zip(found, blocks, strict=True):
        assert encoded.tokens.tolist() == [*trained.encode(block.documents[0].text), 1]


def test_no_more_blocks_are_read_than_workers_can_take(trained):
    read = []

    def blocks():
        for number in range(50):
            read.append(number)
            yield Block(documents=[document("text")])

    results = encode_blocks(blocks(), encoder(trained), workers=3)
    for done in range(1, 20):
        next(results)
        assert len(read) <= done + 3
    results.close()


class PanicException(BaseException):
    """What the native library raises is no Exception either."""


def test_a_native_panic_names_its_document(trained, monkeypatch):
    def encode_batch(texts):
        if any("bad" in text for text in texts):
            raise PanicException("index out of bounds")
        return [[3] for _ in texts]

    monkeypatch.setattr(trained, "encode_batch", encode_batch)
    block = Block(documents=[document("fine"), document("bad", number=17), document("fine")])
    with pytest.raises(DataError, match=r"fails on record 17 of a\.txt \(3 bytes\): index out"):
        encoder(trained).encode(block)
