"""The log in files that never change: sealed segments, a manifest with a chain, readers of both."""
