"""Devices of updates, and how exactly a replay agrees on each, as plain data."""

from typing import Literal

DeviceName = Literal["cpu", "cuda", "mps"]

EqualityClass = Literal["bits", "bits on this device", "stored"]
"""Classes of reproducibility: on any CPU with the same versions; on the same model of device with the same versions;
or, without deterministic algorithms, only from the stored inputs."""

# Metal has no deterministic kernels, so later stages repeat only from stored batches.
EQUALITY: dict[DeviceName, EqualityClass] = {"cpu": "bits", "cuda": "bits on this device", "mps": "stored"}
"""Equality class of updates by device."""

EQUAL_IN_WORDS: dict[EqualityClass, str] = {
    "bits": "identical",
    "bits on this device": "same bits on this device",
    "stored": "as stored, this time",
}
"""Result of a replay without differences, by class; only the strongest is called identical."""


def asks_for_gpu(problem: Exception) -> bool:
    """Return True for torch's error when code requests a missing GPU."""
    return any(words in str(problem) for words in ("CUDA", "cuda", "NVIDIA"))


ON_DEVICE = "required tensors on the device of its inputs, as in torch.zeros(..., device=inputs.device)"
"""Advice for networks and policies that request a GPU, although they act on the CPU."""
