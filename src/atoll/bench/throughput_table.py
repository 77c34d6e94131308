"""What people read of a throughput document: rates, memory, terms against their floors."""

from collections.abc import Iterator
from typing import Any

from atoll.runner.progress import rate

GIB = 1 << 30

TITLES = {
    "gemm": "products",
    "attention": "attention",
    "loss": "loss",
    "elementwise": "element-wise",
    "optimizer_mixing": "optimizer + mixing",
    "other": "other",
    "pauses": "pauses",
}


def table(document: dict[str, Any]) -> str:
    """Return the lines for people, of either kind of document."""
    if "runs" not in document:
        return "\n".join(_one(document))
    return "\n".join(_price(mode, price) for mode, price in document["price"].items())


def _price(mode: str, price: dict[str, Any]) -> str:
    off, on = (price["targets_per_second"][condition]["median"] for condition in ("off", "on"))
    pairs = " and ".join(f"{percent:.1f}%" for percent in price["percent_by_pair"])
    return (
        f"{mode}: {rate(off)} targets, {rate(on)} deterministic; the price is "
        f"{price['percent']:.1f}% ({pairs} in the two pairs)"
    )


def _one(document: dict[str, Any]) -> Iterator[str]:
    device, roofs = document["device"], document["roofs"]
    where = device["name"] or f"{document['machine']['processor']}, {document['threads']} threads"
    yield (
        f"{where}: products {roofs['flops_per_second'] / 1e12:.3g} TFLOP/s "
        f"({roofs['gemm_dtype']}), copies {roofs['bytes_per_second'] / 1e9:.4g} GB/s"
    )
    for mode, found in document["modes"].items():
        yield from _mode(mode, found, document)
    for ratio in document["ratios"]:
        yield _ratio(ratio)


def _mode(mode: str, found: dict[str, Any], document: dict[str, Any]) -> Iterator[str]:
    rates = found["targets_per_second"]
    peak, of = found["peak_device_bytes"], ""
    if peak is None:
        peak, of = document["peak_host_bytes_of_all_modes"], " of the process"
    memory = "" if peak is None else f", peak {peak / GIB:.2f} GiB{of}"
    yield (
        f"{mode}: {rate(rates['median'])} targets [{rate(rates['min'])} .. {rate(rates['max'])}] "
        f"over {found['num_windows']} windows of {document['updates_per_window']} updates{memory}"
    )
    floor = found["floor"]
    yield (
        f"  {_ns(found['ns_per_target'])} ns/target; floors sum to "
        f"{_ns(floor['total_ns_per_target'])} ns ({rate(floor['targets_per_second'])}), "
        f"{_ns(floor['absorbed_ns_per_target'])} ns ({rate(floor['absorbed_targets_per_second'])}) "
        "with loss, rotary and SwiGLU inside products"
    )
    yield f"  {found['share_of_product_roof']:.1%} of the product roof by model operations"
    if found["against_floor"] is not None:
        yield from _terms(found["against_floor"], found["trace"])


def _terms(against: dict[str, Any], trace: dict[str, Any]) -> Iterator[str]:
    yield f"  {'':<20}{'ns/target':>12}{'share':>8}{'floor':>12}{'of roof':>9}{'remains':>12}"
    for term, entry in against["terms"].items():
        roof = entry["share_of_roof"]
        yield (
            f"  {TITLES[term]:<20}{_ns(entry['measured_ns_per_target']):>12}"
            f"{entry['share_of_time']:>8.1%}{_ns(entry['floor_ns_per_target']):>12}"
            f"{'-' if roof is None else f'{roof:.1%}':>9}"
            f"{_ns(entry['remaining_ns_per_target']):>12}"
        )
    pause = against["remaining_by_term_ns_per_target"]["pauses"]
    yield f"  {TITLES['pauses']:<20}{_ns(pause):>12}{'':>29}{_ns(pause):>12}"
    largest = against["largest_remaining"]
    yield (
        f"  remains to the floors: {_ns(against['remaining_ns_per_target'])} ns, most of it in "
        f"{TITLES[largest['term']]}: {_ns(largest['ns_per_target'])} ns"
    )
    launch = trace["host_launch"]
    if launch is not None:
        yield (
            f"  device busy {trace['busy_share']:.1%} of the trace, {trace['gaps']['count']} gaps, "
            f"the largest {trace['gaps']['largest_us']:.0f} us; {launch['count']} launches took "
            f"the host {_ns(launch['ns_per_target'])} ns/target"
        )
    unknown = trace["unknown"]
    if unknown["count"]:
        names = ", ".join(entry["name"] for entry in unknown["names"][:5])
        yield (
            f"  {unknown['count']} calls that no rule knows took {_ns(unknown['ns_per_target'])} "
            f"ns/target, counted as other: {names}"
        )


def _ratio(ratio: dict[str, Any]) -> str:
    what = f"{ratio['a']} / {ratio['b']}: {ratio['ratio']:.3f}"
    interval = ratio["interval"]
    if interval is None:
        return f"{what} in speed, no interval ({ratio['verdict']})"
    return (
        f"{what} [{interval['low']:.3f}, {interval['high']:.3f}] in speed, 95%, "
        f"{interval['num_blocks']} blocks: {ratio['verdict']}"
    )


def _ns(value: float) -> str:
    """Return nanoseconds with one decimal below a thousand, whole above."""
    return f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"
