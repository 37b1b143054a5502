"""How many steps are taken, and how many of them are left out of the figures, if no flag says otherwise."""

# Of what is started by hand
STEPS, STEPS_ON_CPU = 50, 24  # of a stage
WARMUP = 4  # left out: compilation, autotuning, memory touched for the first time
STEPS_OF_SCRIPT = WARMUP + 20  # after which watch.py stops it

# In a round of the bench
TURNS = 7  # of a row on a CPU; a row that takes no turns counts at least as many steps
WARMUP_OF_PLAIN = 20  # on a CPU, where it gets faster for longer than any other row
STEPS_OF_ROW_ON_CPU = WARMUP_OF_PLAIN + TURNS
STEPS_OF_ROW = WARMUP + 160  # on a card at most; the last one is profiled
