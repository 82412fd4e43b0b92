"""Training state of a worker: tensors cut into shards, their holders and their checksums."""
