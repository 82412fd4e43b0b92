"""The `autohet` commands: each module is one command."""
