"""What a probe has said of versions and trials, in a file beside the log, by draw.

`values.jsonl` has a line for what was asked at a time, `about.json` says of which run and probe. So
a command that was ended asks nothing twice. What the newest one has come to is in `found.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from dora_pipe.audit.bisect import Ask, Values
from dora_pipe.audit.line_file import append_lines, line_of, read_lines, write_whole
from dora_pipe.core.errors import ResourceError, UsageError

FOLDER: Final = "bisect"
"""In a run's directory: a folder for every probe, by digest."""

ABOUT: Final = "about.json"
VALUES: Final = "values.jsonl"
FOUND: Final = "found.json"


Kept = TypeVar("Kept", bound=msgspec.Struct)

DRAWS: Final = 2
"""Another number where a draw of an evaluation is of another seed than it was."""


class AboutProbe(msgspec.Struct, frozen=True, kw_only=True):
    """Whose values a folder has.

    Example: ``AboutProbe(run="demo", started_ns=17, probe="eval", digest="ab12...")``
    """

    run: str
    started_ns: int
    """`run started`, which tells runs of the same name apart."""
    probe: str
    """As the command was given it."""
    digest: str
    """sha256 of its code: of the rewards of an evaluation, of the module of a function."""
    engine: str = ""
    """Name and version of what has sampled."""
    draws: int = DRAWS


class ProbedValues(msgspec.Struct, frozen=True, kw_only=True):
    """Values of a subject. Example: ``ProbedValues(of="version 96", first=256, values=[1.0])``"""

    of: str
    first: int
    """The draw that the first value is of."""
    values: list[float | None]


class KeptSuspect(msgspec.Struct, frozen=True, kw_only=True):
    """See `culprits.Suspect`."""

    name: str
    step: int
    deviations: float
    reasons: list[str]


class BisectFound(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a command. Example: ``BisectFound(good=80, bad=120, conclusion=["nothing
    fell"], like={"version 80": "good"})``"""

    good: int
    bad: int
    conclusion: list[str]
    like: dict[str, str] = {}
    """Verdicts, by what they are of."""
    suspects: list[KeptSuspect] = []


@dataclass(slots=True)
class ProbedFile:
    """The folder of one probe's values.

    Example: ``ProbedFile(Path("runs/demo/bisect/ab12cd34ef56"))``
    """

    folder: Path
    known: dict[str, list[float | None]] = field(default_factory=dict)
    """By subject, draws from 0 on."""

    def begin(self, about: AboutProbe) -> None:
        """Make the folder, or take up what is there. Raises ResourceError, UsageError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / ABOUT).is_file():
                write_whole(self.folder / ABOUT, about)
        except OSError as error:
            raise ResourceError(f"{self.folder}: {error.strerror or error}") from error
        self.read()

    def read(self) -> None:
        """Take up the values that are there. Raises UsageError, ResourceError."""
        for one in read_lines(self.folder / VALUES, ProbedValues, hint="delete the file"):
            there = self.known.setdefault(one.of, [])
            if one.first == len(there):
                there += one.values

    def about(self) -> AboutProbe:
        """Whose values these are. Raises UsageError, ResourceError."""
        return _decoded(self.folder / ABOUT, AboutProbe)

    def found(self) -> BisectFound | None:
        """What the newest command has come to, if one has. Raises UsageError, ResourceError."""
        path = self.folder / FOUND
        return _decoded(path, BisectFound) if path.is_file() else None

    def keep(self, found: BisectFound) -> None:
        """Write down what this command has come to. Raises ResourceError."""
        try:
            write_whole(self.folder / FOUND, found)
        except OSError as error:
            raise ResourceError(f"{self.folder}: {error.strerror or error}") from error

    @property
    def stamp(self) -> tuple[int, ...]:
        """Changes whenever something was written."""
        files = (self.folder / VALUES, self.folder / FOUND)
        there = [one.stat() for one in files if one.is_file()]
        return tuple(at for one in there for at in (one.st_mtime_ns, one.st_size))

    def left(self, ask: Ask) -> range:
        """The draws that are not known yet."""
        return range(len(self.known.get(ask.subject.words, ())), ask.draws)

    def of(self, ask: Ask) -> Values:
        return self.known.get(ask.subject.words, [])[: ask.draws]

    def add(self, ask: Ask, values: Sequence[float | None]) -> None:
        """Take up what the next draws have said, and write it down. Raises ResourceError."""
        there = self.known.setdefault(ask.subject.words, [])
        line = ProbedValues(of=ask.subject.words, first=len(there), values=list(values))
        with append_lines(self.folder / VALUES) as file:
            file.write(line_of(line))
        there += line.values


def _decoded(path: Path, kind: type[Kept]) -> Kept:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="delete the folder") from error
