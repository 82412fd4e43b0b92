"""Every size, budget and tolerance of the search, with its unit and the reason for it. A budget depends on a fleet's size by one formula,
so that the same mechanisms run on three GPUs and on a thousand; all are counts, since a result must not depend on the machine's speed."""

# ---- what there is to choose from ----
EVERY_NUMBER = 16  # pipelines: up to so many every number of them is tried
NUMBERS_APART = 9 / 8  # beyond, numbers of pipelines at least that far apart, since near ones make nearly equal plans
TYPE_ORDERS = 6  # orders of the node types along a pipeline: all of three types

# ---- drafts: families of near-equal pipelines ----
FAMILIES = 240  # families at most whose cuts are computed, those first that a closed form ranks first
FAMILIES_TOGETHER = 60  # of these as many at a time: more only while the closed form lets hope for a better one
OF_EACH_BLOCK = 6  # families of some node types that are combined with those of others
CUTS_TIMED = 4  # of the orders of one family, or of its other groups, with their links and sync
DRAFTS = 12  # drafts that are placed and predicted: the estimate is within 3% of the prediction in nine cases of ten
PARTS = (1, 2, 3, 4, 6, 8)  # parts into which pipelines side by side are divided, so that fewer share a card
PARTED = 3  # drafts that are placed in all of these
FAR_BEHIND = 1.15  # times the best: what is slower is not made best by single moves
BISECTIONS = 12  # steps of the closed form's bottleneck: to a thousandth of its range
CUT_TOLERANCE = 1.001  # ratio of bottlenecks at which a bisection stops: a block more or less is a hundredth
NEAR_EVEN = 1.4  # times an even share of the work: most bottlenecks lie below
LONGER = 1.01  # ratio of the first two times tried in sharing microbatches
SHARED_WITHIN = 1e-4  # of the step time, at which sharing stops: a microbatch is a hundredth of it
CUTS_AT_ONCE = 700  # entries of an array below which numpy costs the same however short it is

# ---- improvement ----
TRIES_GPUS = 12_000  # tries times GPUs: a prediction's time grows with the GPUs
MOST_TRIES = 1_000  # of small fleets: the reach is a second
FEWEST_TRIES = 60  # of large fleets: the reach is five seconds
WALKS = 4  # starts, each with a part of the tries, before the best goes on
HOT = 1e-3  # share of the step time that a change may cost at first
COLD = 1e-6  # and in the end
HOPELESS = 12.0  # heats: a worse change is taken once in 160,000 tries
STRAYED = 1.03  # times the best: from there a walk returns to it
FEW_MICROBATCHES = 4  # a stage: with fewer, too many forwards first may hold backwards up
AS_FAST = 1.0005  # times the best: within it fewer microbatches are kept in flight
PASSED_ON = 0.06  # share of the moves that pass a microbatch on
TWO_AT_ONCE = 0.12  # share of the moves that are two
REGROUPED = 6  # best families that are tried with other groups
REGROUPINGS = 2  # times: a plan has three TP degrees on one node type at most

# ---- replanning ----
WHOLE_SEARCH_GPUS = 64  # up to so many a whole search takes about a second, for which workers can wait
REPAIRS_GPUS = 6_000  # tries times GPUs: the reach is 0.3 s on 256
FEWEST_REPAIRS = 10  # tries
