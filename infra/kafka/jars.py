"""Decides where the broker's jars lie and how a class of them is started."""

import fcntl
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / "build" / "kafka"

JARS_LIMIT_S = 300.0
"""Maven downloads 54 MB the first time."""
TOOL_LIMIT_S = 60.0
JVM = (
    "-Xms256m",
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    f"-Dlog4j2.configurationFile={HERE / 'log4j2.properties'}",
)


class BrokerError(RuntimeError):
    """The broker did not do what it was told; the message ends with the last lines of its log."""


def missing_tools() -> list[str]:
    """The programs that a broker needs and this machine lacks."""
    return [name for name in ("java", "mvn") if shutil.which(name) is None]


def jars() -> Path:
    """The folder of the broker's jars, copied once by Maven and then kept under build/."""
    pom = HERE / "pom.xml"
    folder = CACHE / f"lib-{uuid.uuid5(uuid.NAMESPACE_OID, pom.read_text()).hex[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several pytest processes ask at once
        if not folder.is_dir():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            command = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies"]
            done = run_bounded([*command, f"-DoutputDirectory={part}"], JARS_LIMIT_S)
            if done.returncode:
                raise BrokerError(f"Maven copied no jars:\n{done.stdout[-2000:]}{done.stderr}")
            part.rename(folder)
    return folder


def java(*arguments: str, jvm: Sequence[str] = ()) -> list[str]:
    """The command line of a class of the jars; it dies with the thread that starts it."""
    # A test process that dies must not leave a broker behind.
    tie = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    classes = class_archive()
    shared = [f"-XX:SharedArchiveFile={classes}"] if classes.exists() else []
    return [*tie, "java", *JVM, *shared, *jvm, "-cp", f"{jars()}/*", *arguments]


def class_archive() -> Path:
    """The broker's classes as this Java has parsed and verified them, if `archive_classes` was
    asked for that: with it a broker starts with two thirds of the processor time. Another Java has
    another file."""
    program = Path(shutil.which("java") or "java").resolve()
    which = f"{program} {program.stat().st_mtime_ns}"
    return jars().with_suffix(f".{uuid.uuid5(uuid.NAMESPACE_OID, which).hex[:12]}.jsa")


def tool(*arguments: str) -> str:
    """Run one of Kafka's own tools to its end; what it printed. Raises BrokerError.

    Example: ``tool("org.apache.kafka.tools.ConfigCommand", "--bootstrap-server", ...)``
    """
    done = run_bounded(java(*arguments), TOOL_LIMIT_S)
    if done.returncode:
        raise BrokerError(f"{arguments[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def run_bounded(command: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """A program's exit status and words; it reads nothing and ends within the limit."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
