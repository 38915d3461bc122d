"""Token ids with an embedding row but no token, which engines never sample and the
trainer masks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dora_pipe.core.errors import PolicyError
from dora_pipe.store.model_dir import CONFIG, embedding_rows, read_config

TOKENIZER: Final = "tokenizer.json"


def unassigned_ids(directory: Path) -> tuple[int, ...]:
    """Return the sorted ids; empty without tokenizer.json or config.json. Raises PolicyError."""
    file = directory / TOKENIZER
    there = file.is_file() and (directory / CONFIG).is_file()
    rows = embedding_rows(read_config(directory)) if there else None
    if rows is None:
        return ()
    return tuple(sorted(set(range(rows)) - token_ids(file)))


def token_ids(file: Path) -> frozenset[int]:
    """Return all ids of a tokenizer.json. Raises PolicyError."""
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_buffer(file.read_bytes())
    except (OSError, ValueError) as error:
        raise PolicyError(f"{file} is not a tokenizer: {error}") from None
    return frozenset(backend.get_vocab(with_added_tokens=True).values())
