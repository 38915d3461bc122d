"""Teachers: models whose log-probs of sampled tokens are learnt from."""
