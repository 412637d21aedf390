"""All constants of control, each with its unit."""

# Which drafts are worth their time.
MARGIN = 0.03  # share of plain decoding's speed: least expected speed-up beyond 1, as costs are measured on noisy steps
COMPARING = 0.01  # share of the speed of steps with drafts that plain ones, for comparison, may lose
REST = 8  # steps for which a choice holds: of no drafts, and of a proposer for the same findings
HORIZON = 128  # tokens: most that an output is expected to have yet

# Exploration, where no drafts are expected to pay.
EXPLORING = 0.015  # share of the time of plain steps that it may lose
SAVED = 4.0  # plain steps: most of that time that is saved up, and most debt that is paid back
HOPE = 0.8  # quantile of a sequence's rate of acceptance at which drafts must pay

# What is remembered, and what is taken for granted.
KEEP = 0.97  # share per step: of what earlier steps showed of a sequence, of costs and of the speed-up
UNLIKE = 0.1  # share of sequences that are unlike any before
COMMON = 0.15  # share of a source's prior that each round of a sequence replaces
DEPTH_TRIALS = 16.0  # drafts at a depth that count as much as the rate itself
MOST = 2.0  # times what was expected: a measurement beyond that counts as that, as one stall is no new machine
PRIOR = 0.1  # measurements: weight of the priors that work costs nothing, and that a row costs as its neighbour

# How many tokens of prompts a step reads.
AIM = 0.9  # share of the bound: the context grows with every chunk, and no two steps take the same
ALONE = 4.0  # times the bound, for a step that no other sequence waits for: larger chunks cost less per token
WORTH = 0.55  # share of the most tokens per second, where steps are to be short
