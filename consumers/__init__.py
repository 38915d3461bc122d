"""The trainer: it pulls version-filtered batches, checks them, trains and commits."""
