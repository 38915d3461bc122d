"""One part at a time, no network, no sleeping."""
