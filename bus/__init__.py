"""The log: one port, three buses (memory, SQLite, Kafka) that keep the same promises."""

from dora_pipe.bus.open import open_bus

__all__ = ["open_bus"]
