"""Training state: which worker holds which shard, where copies of it lie, and how it comes back
after a change.

Import from the modules (`recovery.state.layout`, `recovery.transfer.schedule`, ...): this file
stays empty, so that the pure ones never load torch.
"""
