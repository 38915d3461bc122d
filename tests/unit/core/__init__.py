"""Tests of the loop and its helpers."""
