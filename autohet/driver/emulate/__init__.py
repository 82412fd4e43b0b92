"""EMULATED fleets on this machine: real Ray nodes that pose as other machines."""
