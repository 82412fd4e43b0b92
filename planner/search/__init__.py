"""Search for plans of unequal pipelines.

A step takes as long as its slowest pipeline, and what follows it:

    step = max over pipelines of [ F + (K - 1) m ] + sync not hidden + update

with F one microbatch's whole way, K microbatches of the pipeline, and m its bottleneck: the slowest
stage, or a cycle of stages and transfers (`planner.plans.in_flight`). Four wishes follow, which
pull against each other. Bottlenecks alike: each stage holds as many blocks as its GPU earns. Few
stages: F grows with each; but few stages need much memory each. Equal layers on near GPUs:
gradients are summed over the holders of a layer. Large microbatches where launches cost, small ones
where F does.

So the search drafts plans by arithmetic alone, places the best drafts on workers, and lets a walk
under the full prediction find what arithmetic does not know:

1. `drafts.closed_form`: near-equal pipelines, ranked by a closed form over all families.
2. `drafts.cut`, `drafts.cut_ranking`: the best cuts of the first ones, in several orders of types.
3. `drafts.regroup`, `drafts.orders`: groups of other sizes, stages in any order.
4. `drafts.combined_families`: families of different node types that train beside each other;
   `drafts.unlike`: pipelines of two kinds that share the GPUs of each type unevenly.
5. `drafts.place`: pipelines side by side, or each on nodes of its own; tied ends together.
6. `walk`: random moves from the best plans, counted and with a fixed seed.
7. `walk.judge.simplest_near_fastest`: the choice. `bounds`: a lower bound for it.

`memory` repeats this under a few assumptions of what stages do to save memory.
"""
