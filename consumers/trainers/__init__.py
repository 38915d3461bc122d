"""The training back-ends, each imported only where it is used."""
