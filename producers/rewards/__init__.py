"""Rewards by name and weight: built-in functions and users' own."""
