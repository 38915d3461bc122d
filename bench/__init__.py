"""Measures this machine: how fast engine, bus and codec are here; decides nothing."""
