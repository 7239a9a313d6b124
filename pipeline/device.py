"""Devices on which updates run, and how exactly a replay reproduces results on each."""

from typing import Literal

DeviceName = Literal["cpu", "cuda", "mps"]

EqualityClass = Literal["bits", "bits on this device", "stored"]
"""Reproducibility classes, given the same versions. bits: identical on any CPU. bits on this device: identical on the
same device model. stored: only from stored inputs, since there are no deterministic algorithms."""

# Metal has no deterministic kernels, so stages can be replayed only from stored inputs.
EQUALITY: dict[DeviceName, EqualityClass] = {"cpu": "bits", "cuda": "bits on this device", "mps": "stored"}

EQUAL_IN_WORDS: dict[EqualityClass, str] = {
    "bits": "identical",
    "bits on this device": "same bits on this device",
    "stored": "as stored, this time",
}
"""Wording for a replay without differences, by reproducibility class; only the strongest is called identical."""


def asks_for_gpu(problem: Exception) -> bool:
    """Return True if an error's message suggests that code requested a missing GPU."""
    return any(words in str(problem) for words in ("CUDA", "cuda", "NVIDIA"))


ON_DEVICE = "create tensors on the device of its inputs, as in torch.zeros(..., device=inputs.device)"
"""Advice for networks and policies that request a GPU, although they act on the CPU."""
