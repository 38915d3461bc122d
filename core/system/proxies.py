"""Exceptions from the environment's proxies (HTTP_PROXY etc.)."""

from __future__ import annotations

import os
from typing import Final

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_NAMES: Final = ("NO_PROXY", "no_proxy")


def bypass_proxies(*hosts: str) -> None:
    """Bypass proxies for this machine and these hosts, also in child processes.

    Sets both variables, because clients read either.
    """
    bypassed = [word.strip() for name in _NAMES for word in os.environ.get(name, "").split(",")]
    everywhere = "*" in bypassed  # some clients accept it only alone
    hosts = ("*",) if everywhere else (*filter(None, bypassed), *LOOPBACK, *hosts)
    value = ",".join(dict.fromkeys(hosts))
    os.environ.update(dict.fromkeys(_NAMES, value))
