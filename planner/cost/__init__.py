"""Cost of a plan: layers, memory, links, and the simulated step.

Not modelled: when exactly transfers at unlike boundaries meet on one NIC (they share it by how much
of the time each uses it), the gather of slices as work, stragglers and jitter, PCIe switches shared
by GPUs of one node, congestion between nodes, tree all-reduces, interleaved schedules, data
loading, sums that overlap a worker's own last backward.
"""
