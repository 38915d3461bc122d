"""Decides which refusals count as one: those whose words are equal without what an input says."""

from __future__ import annotations

import re
from typing import Final

CHARACTERS_MAX: Final = 120

_SAID: Final = re.compile(
    r"(?<=Invalid value )'.*?(?= \(at \$|$)"
    r"|(?<=unknown field )`.*?(?= \(at \$|$)"
    r"|(?<=column is ).*"
)
"""Where msgspec and Arrow repeat what was there, with quotes of its own in it."""

_DIFFERENT: Final = re.compile(r"`[^`]*`|'[^']*'|\"[^\"]*\"|-?[0-9][0-9a-fx.e+-]*|\[\.\.\.\]")


def wording(message: str) -> str:
    return _DIFFERENT.sub("_", _SAID.sub("_", message))[:CHARACTERS_MAX]
