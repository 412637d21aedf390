"""All tuning constants of control, each with its unit. The grids `RATES` and `KNOTS` only set a resolution."""

# Share of the speed of plain decoding that drafts must be expected to gain, as expected times may be wrong.
MARGIN = 0.03

# Share of the time of plain steps that exploration may lose, where drafts do not pay.
EXPLORING = 0.015

# Share of the speed of steps with drafts that plain steps, for comparison, may lose.
COMPARING = 0.01

# Quantile of a sequence's rate of acceptance, unlike any before, at which drafts must pay to be worth exploration.
HOPE = 0.8

# Steps for which a choice is used again, because choosing takes time too: the choice of no drafts, and of a proposer.
REST = 8

# Share that remains after a step, or an output: of a sequence's evidence, of costs, the speed-up, lengths of outputs.
KEEP = 0.97

# Share of a source's prior that a round of a sequence replaces; and that takes the next one for unlike any before.
UNLIKE = 0.1

# Rate: a sequence unlike any before has rate r with a probability in proportion to r * (SKEW - r), 0.6 on average.
SKEW = 1.2

# Drafts at a depth: weight of the prior that acceptance is the same at all depths.
DEPTH_TRIALS = 16.0

# Measurements: weight of the priors that work costs nothing, and that each row costs as much as the one before.
PRIOR = 0.1

# Times what was expected: a measurement beyond this counts as this, because it may be a stall.
MOST = 2.0

# Share of the bound that a step which reads prompts aims at: reading gets slower as the context grows.
AIM = 0.9

# Times the bound, for a step that reads the prompt of the only sequence: larger chunks take less time per token.
ALONE = 4.0
