"""Tokens in the order of the file become rows in the order they are read.

The reader thread pays for the shuffle: it writes each row to its place while a group comes in from
disk, so that a batch is a slice of consecutive rows, widened. Gathering 128 rows of 1,024 from all
over a group took the step thread 68 us, widening 128 consecutive ones 35 us; writing the rows of a
group to their places takes the reader 34 ms (one core of an EPYC, numpy 2.4).

Shapes: R rows of a group, T tokens of a row, U = T + 1.
"""

import numpy as np


class RowScatter:
    """Takes the tokens of a group piece by piece and leaves its rows shuffled.

    Row j holds tokens [origin + jT, origin + jT + T]. Its first T tokens are written where they
    arrive; its last one is the first of row j + 1 and is copied from there at the end.
    """

    def __init__(self, rows_RU: np.ndarray, order_R: np.ndarray, origin: int) -> None:
        """Prepare to fill all rows.

        Args:
            rows_RU: Where the rows go; every element is written.
            order_R: int64; rows_RU[k] becomes row order_R[k].
            origin: Position of the first token of row 0.
        """
        self._rows_RU = rows_RU
        self._origin = origin
        self._place_R = np.empty_like(order_R)
        self._place_R[order_R] = np.arange(len(order_R), dtype=order_R.dtype)
        # Only the last row can stay partly unwritten, where a split is padded.
        rows_RU[self._place_R[-1]] = 0

    def add(self, position: int, tokens: np.ndarray) -> None:
        """Take the tokens from `position` on; pieces come in order, without gaps."""
        start = position - self._origin
        if start < 0:
            tokens, start = tokens[-start:], 0
        length = self._rows_RU.shape[1] - 1
        end = len(self._rows_RU) * length
        if start <= end < start + len(tokens):
            self._rows_RU[self._place_R[-1], length] = tokens[end - start]
        tokens = tokens[: max(end - start, 0)]
        row, column = divmod(start, length)
        if column and len(tokens):
            head, tokens = tokens[: length - column], tokens[length - column :]
            self._rows_RU[self._place_R[row], column : column + len(head)] = head
            row += 1
        whole = len(tokens) // length
        inputs_RT = self._rows_RU[:, :length]
        inputs_RT[self._place_R[row : row + whole]] = tokens[: whole * length].reshape(-1, length)
        if len(rest := tokens[whole * length :]):
            inputs_RT[self._place_R[row + whole], : len(rest)] = rest

    def finish(self) -> None:
        """Give every row but the last its last target."""
        self._rows_RU[self._place_R[:-1], -1] = self._rows_RU[self._place_R[1:], 0]
