"""How processes hand bytes to each other beside the log; every way behind one port."""
