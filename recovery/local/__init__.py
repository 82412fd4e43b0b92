"""One node's snapshots, in host memory and on its disk."""
