"""Seeds derived by name, so that no two uses of randomness share a stream or an order."""

import hashlib

from atoll.errors import UsageError


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return 63 bits that depend on the seed and on every part of the purpose, in order.

    Parts are length-prefixed, so ("ab", "c") and ("a", "bc") differ, and typed, so 1 and "1" do.

    Args:
        seed: The run's seed; 0 <= seed.
        purpose: What the stream is for, for example ("shuffle", pass_index, group_index).
    """
    if seed < 0:
        raise UsageError(f"seed is {seed}; it must be 0 or larger.")
    digest = hashlib.sha256(b"atoll-seed-1")
    for part in (seed, *purpose):
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest()[:8], "little") >> 1
