"""Tests of data: formats, filters, conversations."""
