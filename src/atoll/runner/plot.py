"""The loss curve of a run as a picture, drawn from metrics.jsonl."""

import io
import json
from pathlib import Path
from typing import Any

from atoll.files import write_bytes


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl by update.

    Of one that was made twice, before and after a kill, the last line counts.
    """
    latest: dict[tuple[str, int], dict[str, Any]] = {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            latest[record["event"], record.get("step", 0)] = record
    return sorted(latest.values(), key=lambda record: record.get("step", 0))


def plot_loss(metrics: Path, picture: Path) -> None:
    """Draw training and held-out loss over updates into an SVG file.

    Equal metrics give an equal picture, byte for byte.
    """
    import matplotlib
    from matplotlib.figure import Figure

    records = read_metrics(metrics)
    with matplotlib.rc_context({"svg.hashsalt": "atoll", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.subplots()
        for event, label, marker in (
            ("train", "training, mean of a window", ""),
            ("evaluation", "held out, fixed subset", "o"),
        ):
            chosen = [record for record in records if record["event"] == event]
            axes.plot(
                [record["step"] for record in chosen],
                [record["loss_nats_per_token"] for record in chosen],
                label=label,
                marker=marker,
                markersize=4,
                linewidth=1.2,
            )
        axes.set_xlabel("update")
        axes.set_ylabel("loss, nats per token")
        axes.grid(alpha=0.3)
        axes.legend()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    write_bytes(picture, buffer.getvalue())
