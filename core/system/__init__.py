"""Clock, files, console, processes, user code and HTTP of this machine."""
