"""Policy stores for tests: small weights, a failing file system, a local S3."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import fs

from dora_pipe.schemas.policy import Manifest
from dora_pipe.store.arrow_files import ArrowFiles, open_files
from dora_pipe.store.safetensors_file import TensorSource, write_tensors
from dora_pipe.store.store import PolicyStore, PublishedVersion

_COUNTER = itertools.count()


class Writer:
    def __init__(self, value: float) -> None:
        self.data = struct.pack("<f", value)

    def __call__(self, path: Path) -> Manifest:
        source = TensorSource(name="x", dtype="F32", shape=(1,), data=lambda: self.data)
        return write_tensors(path, [source])


def assets_in(folder: Path) -> Sequence[Path]:
    folder.mkdir(exist_ok=True)
    results = []
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text(name)
        results.append(folder / name)
    return results


class HeldBack:
    """File system whose first `times` reads and uploads fail; `cut` uploads are truncated."""

    type_name = "s3"

    def __init__(
        self,
        inner: fs.FileSystem,
        *,
        times: int,
        says: str = "Could not connect to server,\n retries exhausted",
    ) -> None:
        self._inner = inner
        self.times = times
        self.says = says
        self.calls = 0
        self.cut = 0
        inner.create_dir("b/r/weights", recursive=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open_output_stream(self, path: str) -> Any:
        self.calls += 1
        if self.calls <= self.times:
            raise OSError(self.says)
        stream = self._inner.open_output_stream(path)
        if self.cut:
            self.cut -= 1
            return _Cut(stream)
        return stream


class _Cut:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __enter__(self) -> _Cut:
        return self

    def __exit__(self, *_: object) -> None:
        self._inner.close()

    def write(self, data: bytes) -> None:
        self._inner.write(data[:-1])


def s3_files(request: pytest.FixtureRequest) -> ArrowFiles:
    # The process's bucket outlives its server.
    return open_files(s3_address(request), folder=f"run-{next(_COUNTER)}")


def s3_address(request: pytest.FixtureRequest) -> str:
    server = pytest.importorskip("moto.server", reason="moto is not installed: no S3 to test on")
    patch = pytest.MonkeyPatch()
    request.addfinalizer(patch.undo)
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    request.addfinalizer(running.stop)
    host, port = running.get_host_and_port()
    options = f"endpoint_override={host}:{port}&scheme=http&region=us-east-1"
    bucket = "policies"
    system, _ = fs.FileSystem.from_uri(f"s3://{bucket}?{options}&allow_bucket_creation=true")
    system.create_dir(bucket)
    return f"s3://{bucket}/prefix?{options}"


class Walk:
    """Writer of versions of 4000 numbers, each with 40 changes.

    Example: ``published = publish_walk(store, 5, full_every=4)``
    """

    def __init__(self, version: int) -> None:
        weights = np.zeros(4000, "<u2")
        for index in range(1, version + 1):
            weights[np.random.default_rng(index).integers(0, 4000, 40)] = index
        self.data = weights.tobytes()

    def __call__(self, path: Path) -> Manifest:
        source = TensorSource(name="x", dtype="BF16", shape=(4000,), data=lambda: self.data)
        return write_tensors(path, [source])


def publish_walk(store: PolicyStore, versions: int, *, full_every: int) -> list[PublishedVersion]:
    results: list[PublishedVersion] = []
    for version in range(versions):
        before = results[-1].manifest.digest if results else ""
        full = version % full_every == 0
        results.append(store.publish_version(Walk(version), before=before, whole=full))
    return results
