"""EMULATED fleets on this machine: real Ray nodes that pose as others."""
