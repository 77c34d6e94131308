"""What a resumed run may change, and how everything else is listed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.config.budget import plan_budget
from atoll.config.schema import RunConfig
from atoll.errors import StateMismatchError
from atoll.runner.changes import FREE, check_changes, config_identity

BASE = RunConfig.model_validate(
    {"training": {"tokens_per_parameters": 2.0, "epoch_tokens_per_parameters": 1.0}}
)
COSINE_STEPS = plan_budget(BASE).total_steps  # 20,403,520 x 2 / 131,072 = 311: all of it warm-up


def changed(**sections: dict) -> RunConfig:
    dumped = BASE.model_dump()
    return RunConfig.model_validate(
        dumped | {name: dumped[name] | values for name, values in sections.items()}
    )


def test_free_settings_are_settings():
    from atoll.checkpoint.compare import flatten

    assert set(flatten(BASE.model_dump())) >= FREE


@given(
    values=st.fixed_dictionaries(
        {},
        optional={
            "training": st.just({"log_every": 3, "checkpoint_policy": "none", "sample_tokens": 2}),
            "data": st.just({"prefetch": False, "placement": "pageable", "prepare_workers": 2}),
            "runtime": st.just(
                {"device": "cuda:1", "output_dir": "x", "trackers": ["wandb"], "cpu_threads": 1}
            ),
        },
    )
)
def test_place_and_output_may_change_and_leave_the_identity(values):
    check_changes(BASE, changed(**values), step=100)
    assert config_identity(changed(**values)) == config_identity(BASE)


def test_every_other_difference_is_listed_with_both_values():
    now = changed(
        optimizer={"lr": 0.5, "grad_clip": None},
        data={"shuffle_seed": 4, "prefetch": False},
        runtime={"seed": 1},
    )
    with pytest.raises(StateMismatchError) as raised:
        check_changes(BASE, now, step=1)
    assert raised.value.message.splitlines()[1:] == [
        "data.shuffle_seed: 0 -> 4",
        "optimizer.grad_clip: 1.0 -> None",
        "optimizer.lr: 0.001 -> 0.5",
        "runtime.seed: 0 -> 1",
    ]
    assert raised.value.exit_code == 2
    assert config_identity(now) != config_identity(BASE)


def test_longer_budget_is_allowed_while_rates_are_the_same():
    longer = changed(training={"tokens_per_parameters": 4.0})
    check_changes(BASE, longer, step=COSINE_STEPS)  # warm-up does not depend on the total
    with pytest.raises(StateMismatchError, match=r"cosine gives update 313 another rate"):
        check_changes(longer, changed(training={"tokens_per_parameters": 8.0}), step=400)


def test_longer_budget_is_allowed_in_the_hold_of_wsd():
    wsd = {"name": "wsd", "warmup_steps": 10, "decay_fraction": 0.2}
    was = changed(lr_schedule=wsd)
    now = changed(lr_schedule=wsd, training={"tokens_per_parameters": 4.0})
    hold_ends = COSINE_STEPS - round(0.2 * COSINE_STEPS)
    check_changes(was, now, step=hold_ends)
    with pytest.raises(StateMismatchError, match="wsd gives update"):
        check_changes(was, now, step=hold_ends + 2)


def test_shorter_budget_is_refused():
    with pytest.raises(StateMismatchError, match="a shorter budget"):
        check_changes(BASE, changed(training={"tokens_per_parameters": 1.0}), step=1)


def test_more_passes_are_allowed_and_fewer_are_not():
    more = changed(data={"passes": 3})
    check_changes(BASE, more, step=10)
    with pytest.raises(StateMismatchError, match=r"data\.passes: 3 -> 1"):
        check_changes(more, BASE, step=10)
