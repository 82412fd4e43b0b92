"""What a worker's training state is: tensors cut into shards, who holds them, what protects
them.
"""
