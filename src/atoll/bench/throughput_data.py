"""Rows to measure with: random ones on the device, or those of a token cache.

Shapes: B rows of a batch, T tokens of a row, U = T + 1, S rows that synthetic data repeat.
"""

from typing import Literal

import torch

from atoll.config.schema import RunConfig
from atoll.data.batch import Batch, Loader
from atoll.data.cache import MANIFEST_NAME, Cache
from atoll.data.settings import check_vocabulary
from atoll.errors import AtollError, UsageError
from atoll.files import identity
from atoll.runner.build import cache_folder, open_split
from atoll.seeds import derive_seed

Data = Literal["synthetic", "cache"]

REPEATED_UPDATES = 64
"""Updates after which synthetic rows come again."""


def open_rows(
    config: RunConfig, data: Data, device: torch.device, *, num_updates: int, seed: int
) -> Loader:
    """Return the rows of whole updates of all local models.

    Args:
        config: The recipe.
        data: Random rows on the device, or those of the recipe's token cache.
        device: Where batches are wanted.
        num_updates: That many rows must be there.
        seed: Of random rows.

    Raises:
        UsageError: There is no token cache.
        ConfigError: It holds too few rows.
    """
    rows = config.training.batch_tokens // config.model.context_length
    if data == "synthetic":
        return SyntheticRows(
            rows=rows,
            context_length=config.model.context_length,
            vocab_size=config.model.vocab_size,
            seed=seed,
            device=device,
        )
    folder = cache_folder(config)
    if not (folder / MANIFEST_NAME).exists():
        raise UsageError(
            f"there is no finished token cache in {folder}.",
            hint="make it with atoll prepare and the same recipe, or give --data synthetic",
        )
    cache = Cache(folder)
    check_vocabulary(
        cache.manifest.tokenizer.vocab_size,
        model_vocab_size=config.model.vocab_size,
        where=str(folder),
    )
    loader = open_split(config, cache, device, "train")
    try:
        loader.require_rows(num_updates * rows)
    except AtollError:
        loader.close()
        raise
    return loader


class SyntheticRows:
    """A `Loader` of uniform random ids that lie on the device from the start, for ever.

    Nothing is read and nothing crosses to the device: a batch is a slice, widened there. Rows come
    again after REPEATED_UPDATES updates.
    """

    def __init__(
        self, *, rows: int, context_length: int, vocab_size: int, seed: int, device: torch.device
    ) -> None:
        """Draw `REPEATED_UPDATES` times `rows` rows.

        Args:
            rows: Sequences of one update.
            context_length: T.
            vocab_size: Ids.
            seed: Decides the ids, whatever the device.
            device: Where they lie.
        """
        generator = torch.Generator().manual_seed(derive_seed(seed, "bench", "synthetic rows"))
        shape = (rows * REPEATED_UPDATES, context_length + 1)
        drawn_SU = torch.randint(0, vocab_size, shape, generator=generator, dtype=torch.int32)
        self._tokens_SU = drawn_SU.to(device)
        self.identity = identity(["synthetic", seed, vocab_size, *shape])
        self.num_rows = 1 << 62

    def batch(self, cursor: int, rows: int) -> Batch:
        """Return rows [cursor, cursor + rows); they own their memory."""
        start, stored = cursor % len(self._tokens_SU), len(self._tokens_SU)
        pieces = [self._tokens_SU[start : start + rows]]
        missing = rows - len(pieces[0])
        while missing > 0:
            pieces.append(self._tokens_SU[: min(missing, stored)])
            missing -= len(pieces[-1])
        tokens_BU = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(torch.int64)
        return Batch(tokens_BU[:, :-1], tokens_BU[:, 1:])

    def weight(self, cursor: int, rows: int) -> float:
        return float(rows * (self._tokens_SU.shape[1] - 1))

    def close(self) -> None:
        return None


class OwnRows:
    """A `Loader` that gives one of N single models the rows that packed model i would get.

    Its cursor counts this model's rows only; no batch crosses an update.
    """

    def __init__(
        self, rows_of_all: Loader, *, model: int, num_models: int, local_rows: int
    ) -> None:
        """Look at rows i b ... (i + 1) b of every N b rows.

        Args:
            rows_of_all: Stays open when this is closed.
            model: i.
            num_models: N.
            local_rows: b, rows of this model in one update.
        """
        self._all, self._model, self._local = rows_of_all, model, local_rows
        self._global = num_models * local_rows
        self.identity = identity([rows_of_all.identity, model, num_models, local_rows])
        self.num_rows = rows_of_all.num_rows // self._global * local_rows

    def batch(self, cursor: int, rows: int) -> Batch:
        return self._all.batch(self._place(cursor, rows), rows)

    def weight(self, cursor: int, rows: int) -> float:
        return self._all.weight(self._place(cursor, rows), rows)

    def close(self) -> None:
        return None

    def _place(self, cursor: int, rows: int) -> int:
        update, within = divmod(cursor, self._local)
        assert within + rows <= self._local, (cursor, rows, self._local)
        return update * self._global + self._model * self._local + within
