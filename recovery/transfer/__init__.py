"""Transfer of training state: the schedule of reads and messages, and each worker's part.

The schedule follows from the shards that are held and the shards that are wanted.
"""
