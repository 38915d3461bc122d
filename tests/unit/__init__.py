"""Tests of single parts, without network or sleeping."""
