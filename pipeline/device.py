"""Devices on which torch computes updates, and how equal a repetition is there, as plain data."""

from typing import Literal

DeviceName = Literal["cpu", "cuda", "mps"]

EqualityClass = Literal["bits", "bits on this device", "stored"]
"""Classes of equality of a repetition: everywhere on the CPU with the same versions; on a device of the same
model with the same versions; or, where there is no deterministic algorithm, only given what is stored before it."""

# Metal has no deterministic variants of its kernels, so there later stages repeat from stored batches only.
EQUALITY: dict[DeviceName, EqualityClass] = {"cpu": "bits", "cuda": "bits on this device", "mps": "stored"}
"""The class that updates on a device can claim."""

EQUAL_IN_WORDS: dict[EqualityClass, str] = {
    "bits": "identical",
    "bits on this device": "same bits on this device",
    "stored": "as stored, this time",
}
"""Claim of a replay that found no difference; only the strongest class is called identical."""
