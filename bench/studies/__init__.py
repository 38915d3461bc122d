"""Studies of whole runs, real and modelled: published tables, paradigms, off-policy objectives."""
