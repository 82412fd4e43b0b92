"""Training state: which worker holds which shard, where its copies are, and how it is restored.

Import from the modules (`recovery.state.layout`, `recovery.transfer.schedule`, ...): this file
imports nothing, so that the pure ones never load torch.
"""

DISTRIBUTION = "autohet"
"""Owner of this package, which `autohet` checks at a start."""
