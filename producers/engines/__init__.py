"""The inference engines, each imported only where it is used."""
