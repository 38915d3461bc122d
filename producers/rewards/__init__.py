"""Rewards by name and weight: what a task asks, and the functions that come with the package."""
