"""The budget in updates, exact for any decimal ratio."""

from decimal import Decimal, localcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.config.budget import as_written, plan_budget
from atoll.config.load import load_config
from atoll.config.model import ModelConfig, parameter_count
from atoll.config.schema import RunConfig


def config(total, epoch, batch=131_072, **model):
    return RunConfig.model_validate(
        {
            "model": model,
            "training": {
                "tokens_per_parameters": total,
                "epoch_tokens_per_parameters": epoch,
                "batch_tokens": batch,
                "micro_batch_size": batch,
            },
        }
    )


def test_the_reference_run_makes_2179_updates_in_one_epoch():
    budget = plan_budget(config(14, 14))
    assert budget.epoch_ends == (2179,)
    assert budget.total_targets == 2179 * 131_072


def test_a_tenth_is_a_tenth():
    assert as_written(0.1) * 10 == 1
    assert plan_budget(config(0.3, 0.1)).num_epochs == 3


@given(epochs=st.integers(1, 60), thousandths=st.integers(100, 5000), rows=st.integers(1, 200))
@settings(deadline=None, max_examples=100)
def test_epoch_ends_are_the_rounded_products(epochs, thousandths, rows):
    epoch = thousandths / 1000
    total = float(Decimal(thousandths) * epochs / 1000)
    budget = plan_budget(config(total, epoch, rows * 1024))
    with localcontext() as context:
        context.prec = 60
        nominal = [
            Decimal(k) * Decimal(repr(epoch)) * 20_403_520 / (rows * 1024)
            for k in range(1, epochs + 1)
        ]
        assert budget.epoch_ends == tuple(int(x + Decimal("0.5")) for x in nominal)


@given(short=st.integers(1, 30), extra=st.integers(0, 30), tenths=st.integers(1, 20))
@settings(deadline=None, max_examples=100)
def test_a_larger_total_leaves_the_earlier_epochs_unchanged(short, extra, tenths):
    few = plan_budget(config(float(Decimal(short * tenths) / 10), tenths / 10))
    many = plan_budget(config(float(Decimal((short + extra) * tenths) / 10), tenths / 10))
    assert many.epoch_ends[:short] == few.epoch_ends


@pytest.mark.parametrize(
    ("recipe", "parameters"), [("20m", 20_403_520), ("50m", 48_507_392), ("90m", 91_605_120)]
)
def test_the_presets_have_exactly_their_parameters(recipe, parameters):
    loaded = load_config([recipe_path(recipe)])
    assert parameter_count(loaded.config.model) == parameters
    assert plan_budget(loaded.config).parameters == parameters


def recipe_path(name):
    from atoll.config.recipes import shipped_recipes

    return shipped_recipes()[name]


@given(
    vocab=st.integers(2, 50),
    layers=st.integers(1, 4),
    kv_heads=st.sampled_from([1, 2, 4]),
    head_width=st.sampled_from([2, 4, 6]),
    ffn=st.integers(1, 20),
    tied=st.booleans(),
)
@settings(deadline=None, max_examples=50)
def test_parameters_are_the_sizes_of_every_matrix_and_scale(
    vocab, layers, kv_heads, head_width, ffn, tied
):
    width = 20
    shapes = [(vocab, width), (width,)] + ([] if tied else [(vocab, width)])
    for _ in range(layers):
        shapes += [(4 * head_width, width), (width, 4 * head_width)]
        shapes += [(kv_heads * head_width, width)] * 2
        shapes += [(ffn, width), (ffn, width), (width, ffn), (width,), (width,)]
    total = sum(shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in shapes)
    model = ModelConfig(
        vocab_size=vocab,
        layers=layers,
        width=width,
        heads=4,
        kv_heads=kv_heads,
        head_width=head_width,
        ffn_width=ffn,
        tied_embeddings=tied,
    )
    assert parameter_count(model) == total
