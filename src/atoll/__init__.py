"""atoll: train language models on islands of compute that talk rarely, and prove what is kept."""

__version__ = "0.1.0"
