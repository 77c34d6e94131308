"""A recipe so small that a command takes a moment."""

SMALL = [
    *("--set", "model.vocab_size=300"),
    *("--set", "data.tokenizer={train_bytes: 20000}"),
    *("--set", "data.validation_fraction=0.2"),
    *("--set", "data.prepare_workers=1"),
]


def arguments(*more, source="corpus"):
    """Return the words of `atoll prepare` for a folder `corpus`."""
    return ["prepare", *SMALL, "--set", f"data.source={source}", *more]
