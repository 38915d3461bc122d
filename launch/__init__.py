"""Start and supervise the roles of a run on this machine, and manage its directory."""
