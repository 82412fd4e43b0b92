"""Inputs of the planner: cluster files, the catalogue, zones, profiles."""
