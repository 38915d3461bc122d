"""Shared base: errors, clock, machine loop, retries, waits."""
