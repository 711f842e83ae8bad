"""The commands. Each command parses its flags and calls the rest of the laboratory."""
