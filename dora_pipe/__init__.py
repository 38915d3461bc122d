"""Asynchronous RL post-training over a log; this name re-exports what users may rely on."""
