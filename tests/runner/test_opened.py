"""A model is opened by any of its paths; text goes on from it, and it can be exported."""

import json
import shutil

import pytest
import torch
from made_up import VOCAB

from atoll.cli.main import run as atoll
from atoll.data.cachewriter import write_cache
from atoll.errors import DataError, UsageError
from atoll.model.generate import generate
from atoll.model.huggingface import load_pretrained, save_pretrained
from atoll.model.llama import Llama
from atoll.model.sampling import Sampler
from atoll.model.tokenizer_folder import SpecialIds
from atoll.runner import run
from atoll.runner.opened import OpenedModel, continue_text, open_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(make_recipe, tmp_path_factory):
    """The folder of a finished run of 8 updates with a checkpoint after 4 and 8."""
    folder = tmp_path_factory.mktemp("opened") / "run"
    recipe = make_recipe(
        epochs=2,
        training={"checkpoint_policy": "interval"},
        runtime={"output_dir": folder},
    )
    run(recipe)
    return folder


def same_weights(one: OpenedModel, other: OpenedModel) -> bool:
    return torch.equal(one.model.arena.data_NP, other.model.arena.data_NP)


def test_a_run_its_last_checkpoint_and_its_weights_are_one_model(folder):
    opened = open_model(folder, device=CPU)
    checkpoint = open_model(folder / "checkpoints" / "step-00000008", device=CPU)
    weights = open_model(folder / "weights", device=CPU)
    assert opened.source == checkpoint.source
    assert same_weights(opened, checkpoint)
    assert same_weights(opened, weights)
    for each in (checkpoint, weights):
        assert each.tokenizer_files == opened.tokenizer_files
        assert each.special_ids == opened.special_ids
    earlier = open_model(folder / "checkpoints" / "step-00000004", device=CPU)
    assert not same_weights(opened, earlier)


def test_a_run_without_exported_weights_has_the_tokenizer_of_its_cache(folder, tmp_path):
    copied = tmp_path / "run"
    shutil.copytree(folder, copied)
    shutil.rmtree(copied / "weights")
    opened = open_model(copied, device=CPU)
    assert opened.tokenizer().encode("w3 w5").ids == [3, 5]
    assert same_weights(opened, open_model(folder, device=CPU))


def test_text_goes_on_piece_by_piece(folder):
    opened = open_model(folder, device=CPU)
    sampler = Sampler(temperature=1.0, seed=4)
    pieces = list(continue_text(opened, "w3 w10", max_tokens=9, sampler=sampler))
    (found,) = generate(opened.model, [[3, 10]], max_tokens=9, sampler=sampler)
    assert "".join(pieces) == " ".join(f"w{id}" for id in found.ids)
    assert len(pieces) == 10


@pytest.fixture
def letters(tmp_path):
    """A model of bytes whose tokenizer has a beginning and an end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    native = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    native.add_special_tokens(["<end>"])
    config = {"vocab_size": 257, "layers": 1, "width": 16, "heads": 2, "ffn_width": 16}
    from atoll.config.model import ModelConfig

    save_pretrained(
        Llama(ModelConfig(**config, context_length=32), seed=1),
        tmp_path / "letters",
        tokenizer={"tokenizer.json": native.to_str().encode()},
        special_ids=SpecialIds(None, (256,)),
    )
    return open_model(tmp_path / "letters", device=CPU)


def test_pieces_hold_whole_characters(letters, monkeypatch):
    text = "é漢😀!"
    ids = letters.tokenizer().encode(text).ids
    monkeypatch.setattr(
        "atoll.runner.opened.stream", lambda *arguments, **named: ([id] for id in ids)
    )
    pieces = list(continue_text(letters, "a", max_tokens=99, sampler=Sampler()))
    assert "".join(pieces) == text
    assert set(pieces) == {*text, ""}


def test_a_character_that_is_never_finished_is_shown_at_the_end(letters, monkeypatch):
    ids = letters.tokenizer().encode("a漢").ids[:-1]
    monkeypatch.setattr(
        "atoll.runner.opened.stream", lambda *arguments, **named: ([id] for id in ids)
    )
    pieces = list(continue_text(letters, "a", max_tokens=99, sampler=Sampler()))
    assert pieces[0] == "a"
    assert set(pieces[-1]) == {"�"}


def test_an_empty_prompt_stands_for_the_start_of_a_document(letters, folder):
    text = "".join(continue_text(letters, "", max_tokens=5, sampler=Sampler()))
    (found,) = generate(letters.model, [[256]], max_tokens=5, stop_ids=(256,))
    assert text == letters.tokenizer().decode(found.ids)
    with pytest.raises(UsageError, match="the prompt is empty"):
        list(continue_text(open_model(folder, device=CPU), "", max_tokens=1, sampler=Sampler()))


def test_what_the_data_put_before_every_document_begins_a_prompt(make_recipe, tmp_path):
    from made_up import made_up_tokens, tokenizer_json

    cache = tmp_path / "cache"
    write_cache(
        cache,
        train=made_up_tokens(2000, 0),
        validation=made_up_tokens(100, 1),
        shard_tokens=1024,
        vocab_size=VOCAB,
        tokenizer_json=tokenizer_json(),
    )
    manifest = json.loads((cache / "manifest.json").read_text())
    assert manifest["tokenizer"]["add_bos"] is False
    opened = open_model(_run_with_bos(make_recipe, tmp_path, cache), device=CPU)
    assert opened.special_ids.bos == 9
    assert opened.tokenizer().encode("w3").ids == [9, 3]


def _run_with_bos(make_recipe, tmp_path, cache):
    """Export a small model as a run would whose cache has `add_bos`."""
    config = make_recipe(data={"cache_path": cache}).model
    save_pretrained(
        Llama(config),
        tmp_path / "weights",
        tokenizer=cache / "tokenizer.json",
        special_ids=SpecialIds(9, (), add_bos=True),
    )
    return tmp_path / "weights"


def test_a_model_without_a_tokenizer_says_so(tmp_path, letters):
    save_pretrained(letters.model, tmp_path / "bare")
    with pytest.raises(DataError, match=r"has no tokenizer.json"):
        open_model(tmp_path / "bare", device=CPU).tokenizer()


def test_generate_prints_the_text_and_nothing_else(folder, capsys):
    words = ["generate", str(folder), "--prompt", "w3 w10", "--max-tokens", "5"]
    assert atoll(words) == 0
    out = capsys.readouterr().out
    (found,) = generate(open_model(folder, device=CPU).model, [[3, 10]], max_tokens=5)
    assert out == " ".join(f"w{id}" for id in found.ids) + "\n"
    assert atoll([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["prompt"], facts["text"]) == ("w3 w10", out.rstrip("\n"))


def test_generate_repeats_a_seed(folder, capsys):
    words = ["generate", str(folder), "--prompt", "w3", "--temperature", "1", "--seed"]
    texts = [(atoll([*words, seed]), capsys.readouterr().out) for seed in "112"]
    assert texts[0] == texts[1] != texts[2]


def test_export_writes_a_folder_once(folder, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = ["export", str(folder), "--output", str(tmp_path / "out")]
    assert atoll(words) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n"
    ours = open_model(folder, device=CPU).model
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "out")("w3 w10 w17").input_ids])
    assert ids.tolist() == [[3, 10, 17]]
    with torch.no_grad():
        exact = theirs(ids).logits
        error = (ours.logits(ids[None])[0] - exact).abs().max()
    assert error < 1e-5 * exact.abs().max()
    assert atoll(words) == 2
    assert "exists and is not empty" in capsys.readouterr().err


def test_export_narrows_when_asked(folder, tmp_path, capsys):
    output = tmp_path / "out"
    assert atoll(["export", str(folder), "--output", str(output), "--dtype", "bfloat16"]) == 0
    narrow = load_pretrained(output).arena.data_NP
    assert torch.equal(narrow, open_model(folder, device=CPU).model.arena.data_NP.bfloat16())


@pytest.mark.parametrize("verb", ["generate", "export"])
@pytest.mark.parametrize("kind", ["absent", "empty", "text"])
def test_what_is_no_model_is_refused(verb, kind, tmp_path, capsys):
    path = tmp_path / kind
    if kind == "empty":
        path.mkdir()
    if kind == "text":
        path.write_text("hello")
    more = ["--output", str(tmp_path / "out")] if verb == "export" else ["--prompt", "a"]
    assert atoll([verb, str(path), *more]) == 2
    err = capsys.readouterr().err
    assert ("does not exist" if kind == "absent" else "is not a model") in err
    assert "hint: name a run's folder" in err
    assert not (tmp_path / "out").exists()


def test_a_foreign_architecture_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert atoll(["generate", str(tmp_path), "--prompt", "a"]) == 2
    assert "model_type is 'gpt2', not 'llama'" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["--temperature=-1", "--top-k=0", "--top-p=2", "--top-p=-1"])
def test_a_sampling_value_out_of_range_is_refused(folder, capsys, wrong):
    assert atoll(["generate", str(folder), "--prompt", "w1", wrong]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"Invalid value for '{wrong.partition('=')[0]}': ")
    assert err.endswith("\n\nhint: `atoll generate --help` shows what there is\n")


def test_a_top_p_of_zero_is_refused(folder, capsys):
    assert atoll(["generate", str(folder), "--prompt", "w1", "--top-p", "0"]) == 2
    assert capsys.readouterr().err == (
        "top_p is 0.0; it must be above 0 and at most 1.\n\n"
        "hint: temperature 0 takes the best token; without top_k and top_p all are possible\n"
    )


@pytest.mark.parametrize("verb", ["generate", "evaluate"])
def test_a_device_that_does_not_exist_is_refused(folder, capsys, verb):
    assert atoll([verb, str(folder), "--device", "gpu"]) == 2
    assert capsys.readouterr().err == (
        "--device is gpu; it must be auto, cpu, cuda, cuda:N (N from 0) or mps.\n\n"
        "hint: `atoll doctor` shows the devices of this machine\n"
    )


def test_exporting_over_a_file_exits_2_and_keeps_it(folder, tmp_path, capsys):
    output = tmp_path / "taken"
    output.write_text("mine")
    assert atoll(["export", str(folder), "--output", str(output)]) == 2
    assert capsys.readouterr().err == (
        f"{output} is a file, not a folder.\n\nhint: choose a new folder\n"
    )
    assert output.read_text() == "mine"
