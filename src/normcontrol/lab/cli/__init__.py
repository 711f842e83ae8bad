"""The command ``normcontrol``: one module for each command. A module reads its flags and calls the
rest of the laboratory; it computes nothing itself."""
