"""How a record that could not be read becomes a dead letter; decides what is left out of it."""

from __future__ import annotations

import logging
from typing import Final

from dora_pipe.errors import SchemaError
from dora_pipe.schemas.dead_letter import DeadLetter, encode_dead_letter

LOG = logging.getLogger(__name__)

DEAD_LETTER_BYTES_MAX: Final = 9 * 1024 * 1024
"""A dead letter above this leaves the value out."""


def sealed(letter: DeadLetter) -> tuple[bytes, tuple[tuple[str, bytes], ...]] | None:
    """Value and headers; None, and a line in the role's talk, for a letter that does not fit."""
    try:
        return encode_dead_letter(letter, record_bytes_max=DEAD_LETTER_BYTES_MAX)
    except SchemaError as error:
        LOG.error("offset %d of %s: %s", letter.offset, letter.topic, error.message)
        return None
