"""Frozen weights in fewer bits than those that are trained."""
