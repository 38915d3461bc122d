"""Transfers of bytes between processes."""
