"""Configuration of a run, decoded strictly from a TOML file."""
