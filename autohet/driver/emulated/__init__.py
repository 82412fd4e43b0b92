"""Emulated fleets on real Ray: nodes that pose as other machines, and their scripted events."""
