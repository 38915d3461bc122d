"""Connections that no proxy of the environment (HTTP_PROXY and its like) may see."""

from __future__ import annotations

import os
from typing import Final

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_NAMES: Final = ("NO_PROXY", "no_proxy")


def bypass_proxies(*hosts: str) -> None:
    """Have this process, and all that it starts from now on, reach its own machine and these hosts
    without a proxy.

    Clients read one of the two variables, so both get what either has.
    """
    known = [one.strip() for name in _NAMES for one in os.environ.get(name, "").split(",")]
    everywhere = "*" in known  # some clients know it only as the whole value
    hosts = ("*",) if everywhere else (*filter(None, known), *LOOPBACK, *hosts)
    value = ",".join(dict.fromkeys(hosts))
    os.environ.update(dict.fromkeys(_NAMES, value))
