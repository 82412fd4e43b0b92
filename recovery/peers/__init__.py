"""Shards that other nodes' agents keep: served, read, and copied there."""
