"""Local web application for one or two logs."""
