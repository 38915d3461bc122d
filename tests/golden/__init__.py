"""Bytes of every released schema version, and the values they hold."""
