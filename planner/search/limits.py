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
SHALLOWER = (1.0, 0.875, 0.75, 0.625)  # of the most stages, tried in turn where drafts lack memory: each stage less is a microbatch less
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
PLAIN = 1.005  # times the fastest: within it, which is less than the model's error, the plan with fewer kinds of pipelines is chosen
PASSED_ON = 0.06  # share of the moves that pass a microbatch on
TWO_AT_ONCE = 0.12  # share of the moves that are two
REGROUPED = 6  # best families that are tried with other groups
REGROUPINGS = 2  # times: a plan has three TP degrees on one node type at most

# ---- replanning ----
WHOLE_SEARCH_GPUS = 64  # up to so many a whole search takes about a second, for which workers can wait
REPAIRS_GPUS = 6_000  # tries times GPUs: the reach is 0.3 s on 256
FEWEST_REPAIRS = 10  # tries

# ---- the bound: all of these change how near it comes and how long it takes, none whether it holds ----
WIDEST_GAP = 0.15  # of a plan over its bound, above which the two say nothing of each other
COARSE = 1.35  # ratio of the ends of the first intervals of bottlenecks
FIRST_DEPTHS = (8, 20, 45)  # stages at which the first intervals of depths end
FINE = 0.001  # of the step time: what narrower intervals would change
DEEP = 0.5  # share of an interval's depths that may count: the cheapest path seldom has the most stages
BOUND_ROUNDS = 40  # of prices; few need more than ten
IDLE_ROUNDS = 2  # without a better bound, after which no more prices are tried
EARLY_HOPE = 1.3  # by how much halving raises what the cuts allow after the first rounds, at most as seen
HOPE = 1.1  # and after three
CLOSE = 5e-4  # of the bound: less is not worth another round
OUTWARD = 0.9  # share of the way to new prices; a price that fell to less has its paths looked at again
NEAR_LEAST = 1.003  # times the least: intervals that may limit the bound soon
HALVINGS = 4  # of intervals, before other prices
BEYOND = 1.3  # times the bound: longer bottlenecks do not limit it
TOGETHER = 64  # intervals solved in one array: beyond, arrays leave the cache
BANDS = (0, 1, 2, 3, 5, 8, 12, 17, 24, 33, 46, 63)  # stages after one, for which its memory is looked at
REPEATS = 12  # of a fixed point, which is near after three
LONGEST_TRANSFER = 3.0  # times the shortest block

# ---- strategies of others ----
CANDIDATES = 8  # plans that are predicted: closed forms are within a few percent
SIMULATED = 2  # times as many grids are simulated
LOOKED_AT = 24  # cuts that are simulated
SHARED_BY_SPEED = 4  # of these, with microbatches by the pipelines' speed as well
METIS_SLACK = 1.08  # times the best closed form: thousands of arrangements end nearly alike
FASOP_SLACK = 1.2  # times the best closed form: cuts are few there, and it is rough
MAX_PERMUTE = 4  # groups of stages that are permuted (Metis's max_permute_len)
REPAIRS = 3  # of over-full stages, as in Metis
MOST_ARRANGEMENTS = 400  # of each number of stages, so that 64 GPUs take a second
POLISHED_GPUS = 32  # fleets up to which single blocks are moved under the prediction
POLISH_ROUNDS = 6  # of these moves
OTHER_KIND = 0.2  # share by which a block's seconds differ where an encoder ends and a decoder begins
SEARCH_SHARE = 4.0  # of an equal share of the time left: most searches end well before their limit
MIN_SEARCH_S = 0.2  # seconds of one fleet's search at least
EXPLAINED_FLEETS = 24  # looked at to say by how much a price limit is too low
EXHAUSTIVE = (5, 6, 16)  # GPUs, blocks and sequences at most: some ten thousand plans
WIDER = 1.25  # each round looks at all plans that stages alone allow to be so much slower than those of the one before

# ---- memory ----
CLEARLY = 1.02  # times faster: by so much a plan that recomputes or shards must be, where one does without: shared moments have no twin
SHARED_BY = (2, 8)  # holders for which stages are cut: the fewest there can be, and where most of what can be saved is

# ---- what is told of a plan ----
KEPT = 6  # drafts beside what the walks ended with, against which a plan's robustness is measured
DRAWS_GPUS = 640  # draws times GPUs: a draw predicts ten plans anew, and a fifth of a second is what a user does not notice
MOST_DRAWS = 20
FEWEST_DRAWS = 4
LAYERS_OFF = 0.05  # of layer times: the cost model's error on measured runs
LINKS_OFF = 0.2  # of bandwidths: what neighbours in a cloud take, and NCCL's choice of algorithm
