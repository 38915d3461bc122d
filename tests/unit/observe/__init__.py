"""Tests of what a run tells the outside of itself."""
