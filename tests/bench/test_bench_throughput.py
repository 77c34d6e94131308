"""Rows, modes, and `atoll bench throughput` end to end on a model of a few thousand parameters."""

import json

import pytest
import torch

from atoll.bench.throughput import Request, throughput
from atoll.bench.throughput_data import REPEATED_UPDATES, OwnRows, SyntheticRows, open_rows
from atoll.bench.throughput_modes import build_contender, default_mode, mode_config
from atoll.cli.main import run
from atoll.config.schema import RunConfig
from atoll.data.batch import IGNORE
from atoll.data.cachewriter import write_cache
from atoll.errors import ConfigError, UsageError
from atoll.train.device import resolve_execution

CPU = torch.device("cpu")
MODEL = {
    "vocab_size": 64,
    "layers": 2,
    "width": 32,
    "heads": 2,
    "ffn_width": 48,
    "context_length": 16,
}
PACKED = {
    "kind": "gossip",
    "placement": "packed",
    "models": 4,
    "topology": "one_peer_exponential",
    "scheme": "awc",
}


def recipe(**sections):
    defaults = {
        "model": MODEL,
        "training": {"batch_tokens": 256, "micro_batch_size": 2},
        "runtime": {"device": "cpu", "deterministic": True},
    }
    return RunConfig.model_validate(defaults | sections)


def packed_recipe():
    return recipe(strategy=PACKED)


def synthetic(**options):
    defaults = {"rows": 4, "context_length": 8, "vocab_size": 50, "seed": 1, "device": CPU}
    return SyntheticRows(**defaults | options)


def contender(config, mode, loader=None):
    loader = loader or open_rows(config, "synthetic", CPU, num_updates=1, seed=0)
    return build_contender(config, mode, loader, CPU, resolve_execution(config.runtime, CPU))


def test_synthetic_rows_are_a_pure_function_of_the_cursor():
    loader, again = synthetic(), synthetic()
    late = loader.batch(37, 3)
    whole = again.batch(30, 12)
    assert torch.equal(late.inputs_BT, whole.inputs_BT[7:10])
    assert torch.equal(late.targets_BT, whole.targets_BT[7:10])
    assert loader.identity == again.identity != synthetic(seed=2).identity
    assert not torch.equal(late.inputs_BT, synthetic(seed=2).batch(37, 3).inputs_BT)


def test_targets_of_synthetic_rows_are_the_next_inputs_and_all_count():
    batch = synthetic().batch(0, 5)
    assert torch.equal(batch.inputs_BT[:, 1:], batch.targets_BT[:, :-1])
    assert batch.inputs_BT.dtype == batch.targets_BT.dtype == torch.int64
    assert int((batch.targets_BT != IGNORE).sum()) == synthetic().weight(0, 5) == 40
    assert 0 <= int(batch.inputs_BT.min()) <= int(batch.inputs_BT.max()) < 50


def test_synthetic_rows_come_again_and_a_batch_may_reach_around():
    loader, stored = synthetic(), 4 * REPEATED_UPDATES
    around = loader.batch(stored - 1, 3)
    assert torch.equal(around.inputs_BT[1:], loader.batch(0, 2).inputs_BT)
    assert torch.equal(loader.batch(stored + 5, 2).inputs_BT, loader.batch(5, 2).inputs_BT)
    long = loader.batch(3, 2 * stored)
    assert torch.equal(long.inputs_BT[stored:], long.inputs_BT[:stored])


def test_a_single_model_gets_the_rows_of_its_packed_twin():
    loader = synthetic(rows=12)
    for model in range(3):
        own = OwnRows(loader, model=model, num_models=3, local_rows=4)
        for update in range(4):
            for start in (0, 2):
                expected = loader.batch(12 * update + 4 * model + start, 2)
                found = own.batch(4 * update + start, 2)
                assert torch.equal(found.inputs_BT, expected.inputs_BT)
        assert own.weight(4, 4) == 32
        assert own.num_rows == loader.num_rows // 12 * 4


def test_a_recipe_is_measured_as_what_it_is():
    assert default_mode(recipe()) == "single"
    assert default_mode(packed_recipe()) == "packed"
    assert mode_config(packed_recipe(), "packed") == packed_recipe()


def test_modes_of_a_recipe_do_equal_work():
    config = packed_recipe()
    found = {mode: contender(config, mode) for mode in ("single", "packed", "sequential")}
    assert {mode: c.targets for mode, c in found.items()} == dict.fromkeys(found, 256)
    assert {mode: c.num_models for mode, c in found.items()} == {
        "single": 1,
        "packed": 4,
        "sequential": 4,
    }
    assert len(found["sequential"].states) == 4
    # One model puts as many rows through a backward as the four do together.
    assert found["single"].micro_targets == 4 * found["packed"].micro_targets == 128
    assert found["sequential"].micro_targets == found["packed"].micro_targets


@pytest.mark.parametrize("mode", ["packed", "sequential"])
def test_a_recipe_of_one_model_has_no_packed_modes(mode):
    with pytest.raises(UsageError, match=r"strategy\.models 1") as error:
        mode_config(recipe(), mode)
    assert "packed8-20m-awc" in (error.value.hint or "")


def test_sequential_models_make_the_updates_of_packed_models_that_do_not_mix():
    # An outer step far away: until then packed local models train alone.
    diloco = {"kind": "diloco", "placement": "packed", "models": 4, "local_steps": 100}
    config = recipe(strategy=diloco)
    packed, sequential = contender(config, "packed"), contender(config, "sequential")
    packed.run(3)
    sequential.run(3)
    assert packed.states[0].step == 3
    assert packed.states[0].cursor == 3 * 16
    assert [state.cursor for state in sequential.states] == [3 * 4] * 4
    for model, state in enumerate(sequential.states):
        # float32: batched and plain products sum in another order; 3 updates of relative 1e-7.
        assert torch.allclose(
            state.model.arena.data_NP[0],
            packed.states[0].model.arena.data_NP[model],
            rtol=1e-4,
            atol=1e-6,
        )
    assert packed.loss == pytest.approx(sequential.loss, rel=1e-5)


def test_updates_go_on_at_the_last_rate_when_the_run_would_be_over():
    config = recipe(
        training={
            "batch_tokens": 256,
            "micro_batch_size": 16,
            "tokens_per_parameters": 0.2,
            "epoch_tokens_per_parameters": 0.1,
        },
        lr_schedule={"warmup_steps": 1},
    )
    single = contender(config, "single")
    single.run(30)
    assert single.states[0].step == 30


def test_a_cache_that_is_not_there_is_named_with_a_way_out(tmp_path):
    config = recipe(data={"cache_path": tmp_path / "nothing"})
    with pytest.raises(UsageError, match="nothing") as error:
        open_rows(config, "cache", CPU, num_updates=1, seed=0)
    assert "atoll prepare" in (error.value.hint or "")


def test_a_cache_gives_its_rows_and_one_that_is_too_small_is_refused(tmp_path):
    tokens = torch.arange(16 * 40 + 1).numpy() % 64
    write_cache(tmp_path / "cache", train=tokens, shard_tokens=1000, vocab_size=64)
    config = recipe(data={"cache_path": tmp_path / "cache"})
    loader = open_rows(config, "cache", CPU, num_updates=2, seed=0)
    assert loader.batch(0, 16).inputs_BT.shape == (16, 16)
    loader.close()
    with pytest.raises(ConfigError, match="128 tokens are missing"):
        open_rows(config, "cache", CPU, num_updates=3, seed=0)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(modes=("single", "single")), "given twice"),
        (Request(modes=("single", "packed"), windows=5), "5 windows"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_it_starts(request_, message):
    with pytest.raises(UsageError, match=message):
        throughput(packed_recipe(), request_, command=[])


SETTINGS = [
    *(f"model.{name}={value}" for name, value in MODEL.items()),
    *(f"strategy.{name}={value}" for name, value in PACKED.items()),
    *("training.batch_tokens=256", "training.micro_batch_size=2", "runtime.device=cpu"),
]
ARGUMENTS = ["bench", "throughput", *(word for text in SETTINGS for word in ("--set", text))]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The document, standard output and standard error of one measurement of all modes."""
    import contextlib
    import io

    output = tmp_path_factory.mktemp("throughput") / "document.json"
    words = ["--updates", "2", "--windows", "8", "--seed", "5", "--output", str(output)]
    words += ["--mode", "packed", "--mode", "sequential", "--mode", "single"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert run([*ARGUMENTS, *words]) == 0
    document = json.loads(out.getvalue().strip().splitlines()[-1])
    assert document == json.loads(output.read_text())
    return document, out.getvalue(), err.getvalue()


@pytest.mark.slow
def test_the_last_line_is_one_document_and_people_read_a_table(measured):
    document, out, err = measured
    assert out.count("\n") == 1
    for words in (
        "packed / sequential",
        "optimizer + mixing",
        "remains to the floors",
    ):
        assert words in err
    assert document["data"]["kind"] == "synthetic"
    assert document["execution"] == {
        "amp": None,
        "kernels": False,
        "compiled": False,
        "captured": False,
    }
    assert {"python", "torch"} <= set(document["versions"])
    assert document["config"]["strategy"]["models"] == 4
    assert document["peak_host_bytes_of_all_modes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["packed", "sequential", "single"])
def test_every_sample_is_kept_and_the_median_comes_from_them(measured, mode):
    found = measured[0]["modes"][mode]
    assert len(found["seconds"]) == found["num_windows"] == 8
    assert len(found["warm_up_seconds"]) == measured[0]["warm_up_windows_per_mode"]
    assert sum(block.count(mode) for block in measured[0]["order"]) == 8
    rates = sorted(found["targets_per_window"] / seconds for seconds in found["seconds"])
    assert found["targets_per_window"] == 2 * found["targets_per_update"] == 512
    assert found["targets_per_second"] == {
        "median": pytest.approx((rates[3] + rates[4]) / 2),
        "min": rates[0],
        "max": rates[-1],
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["packed", "sequential", "single"])
def test_terms_sum_to_what_was_traced_and_nothing_is_unknown(measured, mode):
    found = measured[0]["modes"][mode]
    trace, against = found["trace"], found["against_floor"]
    terms = {term: entry["measured_ns_per_target"] for term, entry in against["terms"].items()}
    assert terms == trace["terms_ns_per_target"]
    products = against["terms"]["gemm"]
    assert products["measured_us_per_update"] == pytest.approx(256 * terms["gemm"] / 1000)
    assert sum(terms.values()) == pytest.approx(trace["total_ns_per_target"])
    assert sum(terms.values()) + trace["gaps"]["ns_per_target"] == pytest.approx(
        trace["span_ns_per_target"]
    )
    assert all(spent > 0 for spent in terms.values())
    assert trace["unknown"] == {"count": 0, "ns_per_target": 0, "names": []}
    floor = found["floor"]["total_ns_per_target"]
    assert against["remaining_ns_per_target"] == pytest.approx(trace["span_ns_per_target"] - floor)


@pytest.mark.slow
def test_ratios_are_paired_by_block(measured):
    pairs = {(ratio["a"], ratio["b"]): ratio for ratio in measured[0]["ratios"]}
    assert set(pairs) == {
        ("packed", "sequential"),
        ("packed", "single"),
        ("sequential", "single"),
    }
    for ratio in pairs.values():
        assert len(ratio["block_log_time_ratios"]) == ratio["num_blocks"] == 4
        # Four blocks: one that the machine disturbed leaves too few, and the record says so.
        sound = 4 - len(ratio["void_blocks"])
        assert (ratio["interval"] is not None) == (sound == 4)
        assert ratio["verdict"] in ("faster", "slower", "undecided", "too few", "void")


@pytest.mark.slow
def test_without_a_trace_there_are_rates_and_floors_only(capsys):
    words = ["--updates", "1", "--windows", "1", "--no-trace", "--deterministic", "on"]
    assert run([*ARGUMENTS, *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["deterministic"] is True
    assert list(document["modes"]) == ["packed"]
    assert document["modes"]["packed"]["trace"] is None
    assert document["modes"]["packed"]["floor"]["total_ns_per_target"] > 0


@pytest.mark.slow
def test_both_conditions_are_measured_in_processes_of_their_own(capfd):
    words = ["--updates", "1", "--windows", "1", "--no-trace", "--deterministic", "both"]
    assert run([*ARGUMENTS, *words]) == 0
    captured = capfd.readouterr()
    document = json.loads(captured.out.strip().splitlines()[-1])
    assert document["order"] == ["off", "on", "on", "off"]
    assert [one["deterministic"] for one in document["runs"]] == [False, True, True, False]
    assert len(document["price"]["packed"]["percent_by_pair"]) == 2
    assert document["price"]["packed"]["interval"] is None
    assert "the price is" in captured.err
