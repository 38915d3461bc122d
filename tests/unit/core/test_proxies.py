"""Tests that local connections bypass proxies of the environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from urllib.request import getproxies, proxy_bypass

import httpx2
import pytest
import requests.utils

from dora_pipe.core.system.proxies import bypass_proxies
from dora_pipe.producers.sessions.endpoint import host_of_agents

PROXY = "http://192.0.2.1:3128"
BYPASSED = ["127.0.0.1", "localhost", "[::1]", "10.0.0.5", "inside.example"]


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, PROXY)
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "inside.example")


def proxied_by_requests(url: str) -> bool:
    return bool(requests.utils.get_environ_proxies(url))


def proxied_by_httpx2(url: str) -> bool:
    with httpx2.Client() as client:
        return client._transport_for_url(httpx2.URL(url)) is not client._transport


def proxied_by_urllib(url: str) -> bool:
    host = httpx2.URL(url).host
    return "http" in getproxies() and not proxy_bypass(host)


@pytest.mark.parametrize("proxied", [proxied_by_requests, proxied_by_httpx2, proxied_by_urllib])
def test_clients_of_every_kind_bypass_proxies(proxied: Callable[[str], bool]) -> None:
    bypass_proxies("10.0.0.5")
    assert [host for host in BYPASSED if proxied(f"http://{host}:8000/v1")] == []
    assert proxied("http://outside.example/v1")
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"]


@pytest.mark.parametrize("proxied", [proxied_by_requests, proxied_by_httpx2, proxied_by_urllib])
def test_who_bypasses_all_proxies_still_does(
    proxied: Callable[[str], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    bypass_proxies("10.0.0.5")
    assert not proxied("http://outside.example/v1")


@pytest.mark.parametrize(
    ("listen", "host"),
    [("127.0.0.1:0", "127.0.0.1"), ("0.0.0.0:0", "127.0.0.1"), ("localhost:8100", "127.0.0.1")],
)
def test_agents_reach_an_endpoint_by_an_address_in_numbers(listen: str, host: str) -> None:
    assert host_of_agents(listen) == host
