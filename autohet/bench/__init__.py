"""What `autohet bench` runs."""
