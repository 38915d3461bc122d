"""Tests of modelled hardware and of what runs on it."""
