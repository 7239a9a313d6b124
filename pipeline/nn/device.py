"""Setup of a device for deterministic updates."""

import os
import warnings

import torch

from metaloom.pipeline.arithmetic import code_facts
from metaloom.pipeline.device import DeviceName
from metaloom.pipeline.schema import ConfigError

_IS_AVAILABLE = {"cpu": lambda: True, "cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}


def use_device(name: DeviceName) -> torch.device:
    """Set up a device for deterministic algorithms and return it, or raise ConfigError if torch does not find it."""
    if not _IS_AVAILABLE[name]():
        found = ", ".join(known for known, available in _IS_AVAILABLE.items() if available())
        raise ConfigError(
            f"device is {name}, but torch {torch.__version__} finds none here; use one of {found}. A run cannot "
            "change its device: `metaloom fork RUN --run NEW --set device=cpu` continues a stored run on another one"
        )
    if name == "cuda":
        # cuBLAS is deterministic only with a fixed workspace size; it reads the variable before its first call.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # cuDNN copies the weights of recurrent networks at each call, since ours are separate arrays.
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
    if name != "cpu":
        torch.use_deterministic_algorithms(True)
        # TF32 would round the factors of matrix products to 10-bit mantissas.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
    return torch.device(name)


def device_facts(name: DeviceName) -> dict[str, str]:
    """Return the device model and the versions of libraries other than torch that affect results; {} for a CPU."""
    if name == "cuda":
        return {
            "model": torch.cuda.get_device_name(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
        }
    return {"model": "Metal"} if name == "mps" else {}


def arithmetic_facts() -> dict[str, str]:
    """Return the CPU code paths used in this process, keyed by library. Other code paths round differently.

    See `metaloom.pipeline.arithmetic.variables_for` for the environment variables that select them.
    """
    return {**code_facts(), "torch": torch.backends.cpu.get_cpu_capability()}
