"""One configuration tree, decoded strictly from one TOML file, resolved once."""
