"""Train language models on the computers of a household, together."""

__version__ = "0.1.0"
