"""Devices on which torch computes updates, and how exactly a repetition agrees there, as plain data."""

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


def asks_for_gpu(problem: Exception) -> bool:
    """Return True for the error of code that requests a GPU from torch where there is none."""
    return any(words in str(problem) for words in ("CUDA", "cuda", "NVIDIA"))


ON_DEVICE = "required tensors on the device of its inputs, as of torch.zeros(..., device=inputs.device)"
"""Cure of networks and policies that ask for a GPU: they act on the CPU."""
