"""Commands of `autohet`; each module is one command."""
