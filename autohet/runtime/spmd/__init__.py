"""SPMD programs of a real model: capture, execution on plain uneven local tensors, training.

`planner/spmd` plans them.
"""
