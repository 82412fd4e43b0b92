"""Demonstrations on this machine: an emulated spot fleet, and networks of limited bandwidth."""
