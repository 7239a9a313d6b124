"""The settings that `benchmarks/sac.py` and `benchmarks/sac_speed.py` compare under."""

LEARNING_RATE = 3e-4
BATCH_SIZE = 256
MEMORY_SIZE = 1_000_000
DISCOUNT = 0.99
OLD_TARGET_WEIGHT = 0.995
FIRST_TEMPERATURE = 0.2
HIDDEN_SIZES = (256, 256)
RANDOM_STEPS = 10_000
