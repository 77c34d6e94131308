"""Counterbalanced orders: which of two conditions runs when, decided by a published seed."""

from typing import Literal

from atoll.errors import UsageError
from atoll.seeds import derive_seed

Block = Literal["ABBA", "BAAB"]


def counterbalanced(seed: int, num_blocks: int, *, purpose: str = "order") -> list[Block]:
    """Return blocks of four windows, ABBA and BAAB, in an order that the seed decides.

    Inside a block both conditions have the same mean position, so that a linear drift of the
    machine cancels. Blocks come in pairs of one of each, so that each condition begins as often as
    the other, up to one block where `num_blocks` is odd. A longer order continues a shorter one.

    Args:
        seed: Published with the result; 0 <= seed.
        num_blocks: At least 1.
        purpose: Keeps orders of one seed apart.
    """
    if num_blocks < 1:
        raise UsageError(f"{num_blocks} blocks were asked for; at least 1 is needed.")
    blocks: list[Block] = []
    for pair in range((num_blocks + 1) // 2):
        swapped = derive_seed(seed, "bench", purpose, pair) & 1
        pairing: tuple[Block, Block] = ("BAAB", "ABBA") if swapped else ("ABBA", "BAAB")
        blocks += pairing
    return blocks[:num_blocks]
