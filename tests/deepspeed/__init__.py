"""Tests of the DeepSpeed trainer beyond the contract; skipped without the package."""
