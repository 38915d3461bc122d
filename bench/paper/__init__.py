"""`dora-pipe sim paper`: published figures beside those of the simulator's model."""
