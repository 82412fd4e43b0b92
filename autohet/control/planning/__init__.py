"""Planning of generations: proposals, orders, purchases, replication and the outlook."""
