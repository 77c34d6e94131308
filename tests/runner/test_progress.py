"""What people see, and the picture of the loss."""

import io
import xml.etree.ElementTree as ElementTree

import pytest

from atoll.log import JsonLines
from atoll.runner.plot import plot_loss, read_metrics
from atoll.runner.progress import Lines, LiveBar, Pace, duration, live_progress, rate

PACE = Pace(
    step=100,
    total_steps=400,
    loss_nats_per_token=3.14159,
    targets_per_second=12_345,
    seconds_left=200,
)


def test_lines_show_loss_rate_and_time_left():
    stream = io.StringIO()
    with live_progress(stream) as progress:
        assert isinstance(progress, Lines)
        progress.work("prepare: encode", 1, 10)
        progress.work("prepare: encode", 2, 10)
        progress.tick(100, 400)
        progress.pace(PACE)
    assert stream.getvalue() == (
        "prepare: encode\nupdate 100/400  loss 3.1416  targets 12.3k/s  3 min 20 s left\n"
    )


def test_terminal_gets_a_bar_with_the_same_figures():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with live_progress(stream) as progress:
        assert isinstance(progress, LiveBar)
        progress.tick(100, 400)
        progress.pace(PACE)
        progress.note("epoch 1 is done")
    assert "epoch 1 is done" in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (45, "45 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_durations_are_for_people(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("per_second", "text"),
    [(12.3, "12/s"), (812, "812/s"), (9412, "9.41k/s"), (2.314e6, "2.31M/s")],
)
def test_rates_are_for_people(per_second, text):
    assert rate(per_second) == text


def write_metrics(path) -> None:
    metrics = JsonLines(path)
    for step, loss in ((1, 4.0), (2, 3.0), (2, 3.5), (4, 2.0)):
        metrics.write({"event": "train", "step": step, "loss_nats_per_token": loss})
    metrics.write({"event": "evaluation", "step": 4, "loss_nats_per_token": 2.5})
    metrics.close()


def test_of_an_update_made_twice_the_last_line_counts(tmp_path):
    write_metrics(tmp_path / "metrics.jsonl")
    records = read_metrics(tmp_path / "metrics.jsonl")
    losses = [r["loss_nats_per_token"] for r in records if r["event"] == "train"]
    assert losses == [4.0, 3.5, 2.0]


def test_picture_is_valid_and_the_same_each_time(tmp_path):
    write_metrics(tmp_path / "metrics.jsonl")
    for name in ("a.svg", "b.svg"):
        plot_loss(tmp_path / "metrics.jsonl", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    ElementTree.parse(tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "loss, nats per token" in text
    assert "held out, fixed subset" in text
