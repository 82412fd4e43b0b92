"""Sizes, budgets and tolerances of the search, with their units and the reasons for them.

A budget depends on a fleet's size by one formula, so that the same mechanisms run on three GPUs and
on a thousand. All are counts, since a result must not depend on the machine's speed.
"""

# ---- what there is to choose from ----

# pipelines: up to so many every number is tried, beyond numbers a sixteenth apart: nearer ones make
# nearly equal plans
EVERY_NUMBER = 16
# of a ranked list (orders, families, cuts, drafts) that are looked at more closely; all orders of
# three node types
SHORTLIST = 6
FINE = 1e-3  # of the step time: less is not searched for, a hundredth of the model's error
# times faster: what recomputes, shards (shared moments have no twin), has uneven stages or is one
# program must be so
MIN_SPEEDUP = 1.02
# of unlike nodes in one stage at most: of eight parts each must have one, and some several
UNEVEN_GPUS = 4

# ---- drafts ----

# families of near-equal pipelines whose cuts are computed together, best first by a closed form;
# the next only while it lets hope for better ones
FAMILIES = 60
MOST_FAMILIES = 240  # in all
# drafts that are placed and predicted: the estimate is within 3% of the prediction in nine cases of
# ten
DRAFTS = 12
BRIEF_DRAFTS = 6  # of a fleet that is compared with many others
MAX_SLOWDOWN = 1.15  # times the best: what is slower is not made best by single moves
CUT_BY_LISTS = 1  # pipelines that are cut without arrays: a walk asks for one at a time
CUTS_AT_ONCE = 700  # entries of an array below which numpy costs the same however short it is
# times nine tenths of the bottleneck at a perfect balance: most cuts succeed with that much
LIKELY_BOTTLENECK = 1.4

LEVEL = 1.05  # between bottlenecks for which orders of stages are found; their cut is exact
LEVELS = 24  # of them
ORDERED = 2e6  # entries of arrays in all, with which orders are looked for
UNLIKE = 4  # pipelines of two kinds at most: more of them differ little from equal ones
DIVISIONS = 60  # of a fleet into pipelines of two kinds, which are cut
DIVIDED = 2e6  # entries of arrays in all, with which divisions are looked for
# of their bottlenecks, from that of all GPUs to that of a fourteenth of them
WIDE_LEVEL = 1.08
WIDE_LEVELS = 34
UNBALANCED = 1.25  # times the step of a perfect balance, for which divisions are compared
CLIMBS = 10  # drafts from which estimates are climbed, of unlike numbers of pipelines or stages
CLIMBED_STAGES = 20_000  # of changed drafts, in all rounds of a climb but the last
CLIMBED = 16  # changes of a draft whose gradient sync is estimated

# ---- improvement ----
TRIES_GPUS = 24_000  # tries times GPUs: a prediction's time grows with the GPUs
MOST_TRIES = 2_000  # of small fleets: the reach is a second
FEWEST_TRIES = 60  # of large fleets: the reach is five seconds
WALKS = 8  # starts, of which rounds leave one
UNEVEN = 4  # plans from which uneven stages are looked for, in as small a part of the tries
HOT = 1e-3  # share of the step time that a change may cost at first
# times the fastest: within it, which is less than the model's error, the plan with fewer kinds of
# pipelines is chosen
PLAIN = 1.005

# ---- replanning ----
# up to so many a whole search takes about a second, for which workers can wait
WHOLE_SEARCH_GPUS = 64

# ---- the bound: these change how near it comes and how long it takes, never whether it holds ----

WIDEST_GAP = 0.15  # of a plan over its bound, above which the two say nothing of each other
COARSE = 1.35  # ratio of the ends of the first intervals of bottlenecks
# stages after one, for which its memory is looked at; from 8 on also ends of the first intervals
BANDS = (0, 1, 2, 4, 8, 16, 32, 64)
BOUND_ROUNDS = 40  # of prices; few need more than ten
# of a fixed point, of halving at the same prices, of prices without a better bound: most need two
REPEATS = 3
HOPE = 1.3  # by how much halving raises what the cuts allow, at most as seen
# share of the way to new prices; a price that fell to less has its paths looked at again
OUTWARD = 0.9
TOGETHER = 64  # intervals solved in one array: beyond, arrays leave the cache

# ---- strategies of others ----
MOST_PASSES = 256  # microbatches of an SPMD program
# numbers of microbatches from the least that may fit memory on, each twice the one before
TRIED_PASSES = 3
MAX_PERMUTE = 4  # groups of stages that are permuted (Metis's max_permute_len)
REPAIRS = 3  # of over-full stages, as in Metis
MOST_ARRANGEMENTS = 400  # of each number of stages, so that 64 GPUs take a second
# share by which a block's seconds differ where an encoder ends and a decoder begins
OTHER_KIND = 0.2
MIN_SEARCH_S = 0.2  # seconds of one fleet's search at least
EXPLAINED_FLEETS = 24  # looked at to say by how much a price limit is too low
EXHAUSTIVE = (5, 6, 16)  # GPUs, blocks and sequences at most: some ten thousand plans
# each round looks at all plans that stages alone allow to be so much slower than those of the one
# before
WIDER = 1.25

# ---- fleets: which nodes to take, where there is a price ----
# a time limit of so many seconds allows fleets of this many GPUs in all: a count, since an answer
# must not depend on the machine's load; a brief search of 40 GPUs takes about a second
FLEET_GPUS_A_SECOND = 40
FEWEST_FLEETS = 24  # looked at, however large they are
DRAFTED_FLEETS = 100  # of a front whose fleets are compared by drafts alone
FRONT_FLEETS = 2_000  # of a Pareto front, to which numbers of nodes are thinned
FRONT_GPUS = 4_000  # of fleets that a front may look at, whatever the time limit
SEARCH_GPUS = 60  # a walk takes as long as the drafts of so many GPUs
WALK_GAIN = 1.35  # by how much a full search was faster than the best draft, at most as seen
COUNTED_FLEETS = 20_000  # beyond, combinations are told as fleets
FINALISTS = 2  # unlike fleets that are searched in full: the others' drafts are behind
ZONE_SETS = 4  # sets of several zones that are searched
FINAL_BEHIND = 1.1  # times the best draft: a walk improves drafts by less

# ---- memory ----
# holders for which stages are cut: the fewest there can be, and where most of what can be saved
# is
SHARED_BY = (2, 8)

# ---- what is told of a plan ----
DRAWS = 6  # each predicts ten plans anew: a tenth of a second at 64 GPUs, one and a half at 1,024
LAYERS_OFF = 0.05  # of layer times: the cost model's error on measured runs
LINKS_OFF = 0.2  # of bandwidths: what neighbours in a cloud take, and NCCL's choice of algorithm
