"""What starts and watches the roles of a run on this machine, and the directory a run lies in."""
