"""Where a run's log is, as one process tells another; decides how a log is opened."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dora_pipe.bus.claims import ClaimFiles, ClaimStore
from dora_pipe.bus.kafka_security import KafkaSecurity
from dora_pipe.bus.open import open_bus
from dora_pipe.bus.port import Bus
from dora_pipe.bus.splice import spliced
from dora_pipe.config.model import Bus as BusSection
from dora_pipe.policies.claims import SharedClaims


class LogPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A log, and where its values lie that are too large for it; without any secret.

    Example: ``LogPlace(run="demo", url="sqlite:runs/demo/log.sqlite").open()``
    """

    run: str
    url: str
    """As `open_bus` takes it."""
    bus: BusSection | None = None
    """How Kafka is entered; None where that takes nothing. Secrets stay where it says."""
    claims: str = ""
    """Directory of the large values, or of copies of them; empty: there are none."""
    store_url: str = ""
    """The store that has them, where that is another file system."""
    archive: str = ""
    """Directory of an archive that has the beginning of the log."""

    def open(self) -> Bus:
        """The log. Raises BusError, ConfigError for a missing secret or an odd `store_url`."""
        security = None if self.bus is None else KafkaSecurity.of(self.bus)
        bus = open_bus(self.url, security, claims=self.claim_store())
        return spliced(bus, Path(self.archive)) if self.archive else bus

    def claim_store(self) -> ClaimStore | None:
        """Where the large values lie. Raises ConfigError."""
        if not self.claims:
            return None
        if not self.store_url:
            return ClaimFiles(Path(self.claims))
        from dora_pipe.policies.arrow_files import open_files

        return SharedClaims(open_files(self.store_url, folder=self.run), Path(self.claims))
