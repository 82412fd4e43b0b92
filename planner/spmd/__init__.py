"""SPMD programs over unequal devices: rules, search, ratios and what they cost.

Pure: `autohet/runtime/spmd` captures and runs them.

A gradient's layout is its tensor's dual (replicated <-> partial, sharded as it is), so each
instruction has one fixed backward and the forward program is a training program. A signature writes
an operator as an einsum; a rule shards one letter. A letter of the output gives a sharded output,
one that is summed over a partial one. So one line for each kind of operator yields batch, row and
column sharding, heads, vocabulary and experts. ZeRO is a sharded parameter that is gathered: no
rule of its own.

A plan of one stage carries a program (`Stage.spmd`); its microbatches run through it one after the
other, and gradients are summed after the last. State is cut into the units of pipelines' tensor
parallelism, so that checkpoints and moves between plans of both kinds need nothing new.
"""
