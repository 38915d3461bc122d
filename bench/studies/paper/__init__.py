"""`bench paper`: published figures beside those of the modelled cluster."""
