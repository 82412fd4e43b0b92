"""Parts of `autohet plan`: its options, inputs, searches, and the display of plans."""
