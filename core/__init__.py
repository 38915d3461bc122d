"""Errors, and what the roles share: pure types, the loop, the system."""
