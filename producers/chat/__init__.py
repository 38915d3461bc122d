"""Messages to token ids and back: chat templates, bridges between turns, parsers of turns."""
