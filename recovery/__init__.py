"""Training state: which worker holds which shard, where its copies are, and how it is restored.

Import from the modules (`recovery.state.layout`, `recovery.transfer.schedule`, ...): this file
stays empty, so that the pure ones never load torch.
"""
