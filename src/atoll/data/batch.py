"""What a loader gives and what it promises.

Shapes: B rows, T tokens per row (inputs), U = T + 1 tokens read per row.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from atoll.tensors import IGNORE as IGNORE


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows ready for one forward, on the device that the loader places them on.

    A batch owns its memory; no later call of the loader changes it. Inputs and targets may be
    strided views of one buffer: read them, `reshape` rather than `view`, and write to neither.

    Attributes:
        inputs_BT: int64 token ids.
        targets_BT: int64 ids of the next tokens, IGNORE where the loss is not counted.
        weights_BT: float32 weight of each target, or None where each counted target weighs 1.
        positions_BT: int64 positions within the document, or None for 0 ... T-1 in every row.
        documents_BT: int32 document numbers; attention stays inside one. None: one document a row.
    """

    inputs_BT: torch.Tensor
    targets_BT: torch.Tensor
    weights_BT: torch.Tensor | None = None
    positions_BT: torch.Tensor | None = None
    documents_BT: torch.Tensor | None = None


class Loader(Protocol):
    """A pure function of the cursor: the same cursor gives the same rows, however it is reached.

    The cursor counts sequences (token cache) or documents (chat) consumed so far, over all local
    models and ranks, and is the loader's whole state. Local model i of an update of `rows` rows
    asks for its own part of [cursor, cursor + rows), so order depends neither on the number of
    ranks nor on packing, prefetch or placement.
    """

    @property
    def identity(self) -> str:
        """SHA-256 name of the data and of everything that decides their order."""
        ...

    @property
    def num_rows(self) -> int:
        """Rows that exist from cursor 0 on; asking beyond is an error that names the shortage."""
        ...

    def batch(self, cursor: int, rows: int) -> Batch:
        """Return rows [cursor, cursor + rows).

        Raises:
            CacheError: The data do not match their digests, or end before the last row.
        """
        ...

    def weight(self, cursor: int, rows: int) -> float:
        """Return the summed target weight of those rows from an index, without reading them."""
        ...

    def close(self) -> None:
        """Stop the background reader and release memory; closing twice is allowed."""
        ...
