"""How much is held in memory at once, and how often work is made durable."""

from dataclasses import dataclass

from atoll.files import MIB


@dataclass(frozen=True, slots=True)
class Pace:
    """Sizes of the preparing pipeline; the finished cache depends on none of them.

    Attributes:
        block_bytes: UTF-8 text that one worker encodes at a time; a longer document is one block.
        block_records: Records of one block at most, with those that are left out.
        journal_bytes: Text between two durable points; a kill costs the work since the last one.
        copied_rows: Rows of a hub data set between two durable points of its copy.
        rows: Index records handled at a time.
        bucket_documents: Documents whose digests are sorted in memory at a time.
    """

    block_bytes: int = MIB
    block_records: int = 4096
    journal_bytes: int = 16 * MIB
    copied_rows: int = 10_000
    rows: int = 1 << 16
    bucket_documents: int = 1 << 20
