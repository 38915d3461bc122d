"""Hints that say how to install an extra of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Final

CHECKOUT: Final = (Path(__file__).parent.parent / "pyproject.toml").is_file()
"""Whether this package runs from a checkout and not from a wheel."""


def install_hint(extra: str, *, options: str = "", checkout: bool = CHECKOUT) -> str:
    """The command that installs an extra: the package is on no index, so its name installs nothing.

    Example: ``install_hint("torch") == "pip install -e '.[torch]'"`` in a checkout.
    """
    if checkout:
        return f"pip install {options}-e '.[{extra}]'"
    return f"pip install {options}'dora_pipe-VERSION-py3-none-any.whl[{extra}]'"
