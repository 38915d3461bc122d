"""Tests of the trainer's parts."""
