# The default run, smaller and with checkpoints.
s/^steps = 300 /steps = 1600 /
s/^hidden = 128 /hidden = 64 /
s/^intermediate = 352 /intermediate = 176 /
s/^every = 0 /every = 50 /
