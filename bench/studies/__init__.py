"""Studies of real and modeled runs: published tables, paradigms, off-policy objectives."""
