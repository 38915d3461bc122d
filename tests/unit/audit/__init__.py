"""Tests of dora_pipe.audit: books, ledger, walk, records, replay, export."""
