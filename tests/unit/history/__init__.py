"""Tests of dora_pipe.history: books, ledger, walk, records, replay, export."""
