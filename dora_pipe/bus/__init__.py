"""The log: one small port and its implementations, which decide nothing about what they carry."""
