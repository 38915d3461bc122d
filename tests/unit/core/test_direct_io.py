"""Files past the page cache have the bytes that they would have through it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from dora_pipe.core import direct_io
from dora_pipe.core.direct_io import BLOCK_BYTES, read_direct, write_direct

SIZES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 5 * BLOCK_BYTES + 7]


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of two blocks, so that small files have several."""
    monkeypatch.setattr(direct_io, "PIECE_BYTES", 2 * BLOCK_BYTES)
    monkeypatch.setattr(direct_io, "_BUFFERS", [])


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no file system in memory here")
    found = Path(mkdtemp(dir="/dev/shm"))
    yield found
    shutil.rmtree(found)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("size", SIZES)
def test_a_file_of_any_size_comes_back_and_is_what_others_read(folder: Path, size: int) -> None:
    value = os.urandom(size)
    write_direct(folder / "v", value, synced=size % 2 == 0)
    assert (folder / "v").read_bytes() == value
    assert read_direct(folder / "v", size) == value
    assert read_direct(folder / "v", size + 1) is None, "it has another size"


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("size", SIZES)
def test_a_file_system_that_refuses_gets_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    opened = os.open

    def refusing(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            if flags & os.O_CREAT:
                path.touch()  # As Linux does, before it looks at the flag.
            raise OSError(errno.EINVAL, "not here")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    value = os.urandom(size)
    write_direct(tmp_path / "v", value, synced=False)
    assert (tmp_path / "v").read_bytes() == value
    assert read_direct(tmp_path / "v", size) == value


def test_what_is_no_refusal_is_an_error(tmp_path: Path) -> None:
    write_direct(tmp_path / "v", b"v", synced=False)
    with pytest.raises(FileNotFoundError):
        read_direct(tmp_path / "nothing", 1)
    with pytest.raises(FileNotFoundError):
        write_direct(tmp_path / "no" / "folder", b"v", synced=False)
    assert direct_io._BUFFERS, "memory is kept for the next file"
