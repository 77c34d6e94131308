"""Made-up tokens, a tokenizer for them, and the shape of a model that learns them in a second."""

import numpy as np

from atoll.config.model import ModelConfig, parameter_count

VOCAB = 64
MODEL = {
    "vocab_size": VOCAB,
    "layers": 2,
    "width": 32,
    "heads": 2,
    "ffn_width": 48,
    "context_length": 16,
}
BATCH_TOKENS = 128
EPOCH_STEPS = 4


def tokenizer_json() -> bytes:
    """Return a tokenizer of the words w0 ... w63."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer.to_str().encode()


def made_up_tokens(count: int, seed: int) -> np.ndarray:
    """Return ids where the next one mostly follows from the last, so that there is to learn."""
    random = np.random.default_rng(seed)
    jumps = np.where(random.random(count) < 0.8, 7, random.integers(0, VOCAB, count))
    return np.cumsum(jumps) % VOCAB


def budget(epochs: int) -> dict[str, float]:
    """Return the ratios of a budget of `epochs` virtual epochs of EPOCH_STEPS updates."""
    parameters = parameter_count(ModelConfig(**MODEL))
    epoch = round(EPOCH_STEPS * BATCH_TOKENS / parameters, 4)
    return {
        "tokens_per_parameters": round(epochs * epoch, 4),
        "epoch_tokens_per_parameters": epoch,
    }
