"""One step's passes and sums: where a worker stands, its schedule, what runs it, and gradient
sync.
"""
