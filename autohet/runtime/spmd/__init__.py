"""SPMD programs of a real model: captured, run on plain local tensors with uneven shards, and
trained. `planner/spmd` plans them.
"""
