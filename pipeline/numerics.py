"""Numerical settings that affect results, set while a stage runs and restored afterwards.

A notebook cell, a plug-in, or another task on a shared worker may have changed the precision of matrix products, the
default dtype, gradient mode, thread counts or flush-to-zero. Workers import this module, so it does not import torch;
if nothing else has imported torch, its settings cannot have changed.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import ThreadpoolController

from metaloom.pipeline.device import DeviceName

_SMALLEST_NORMAL, _DENORMAL = sys.float_info.min, 5e-324


class Setting(NamedTuple):
    """A numerical setting with its getter, setter and acceptable values, of which the first one is set if necessary."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]
    normal: tuple[Any, ...]


@contextmanager
def normal_numerics(device: DeviceName = "cpu") -> Generator[None]:
    """Within the block, use the numerical settings of runs; restore the previous settings afterwards.

    On GPUs, torch then allows only deterministic algorithms.
    """
    torch = sys.modules.get("torch")
    with ExitStack() as left, np.errstate(divide="warn", over="warn", invalid="warn", under="ignore"):
        if torch is not None:
            # Thread-local modes can be changed only by entering another context.
            if torch.is_inference_mode_enabled():
                left.enter_context(torch.inference_mode(False))
            if torch.is_autocast_enabled("cpu"):
                left.enter_context(torch.autocast("cpu", enabled=False))
            if torch.get_default_device().type != "cpu":
                left.enter_context(torch.device("cpu"))
        left.callback(_restore, of_thread := _of_thread(torch), _set_normal(of_thread))
        left.enter_context(_shared.kept(_of_process(torch, device)))
        yield


def prepare_thread() -> None:
    """Use the numerical settings of runs in this thread, and silence NumPy: non-finite values are detected later."""
    _set_normal(_of_thread(sys.modules.get("torch")))
    np.seterr(over="ignore", invalid="ignore", divide="ignore")


def unusual_numerics() -> dict[str, str]:
    """Return the numerical settings, except thread counts, that differ from those of CPU runs, keyed by name."""
    torch = sys.modules.get("torch")
    values = {s: s.get() for s in (*_of_thread(torch), *_of_process(torch, "cpu")) if "threads" not in s.name}
    unusual = {setting.name: str(value) for setting, value in values.items() if value not in setting.normal}
    if torch is not None:
        modes = {"torch inference mode": torch.is_inference_mode_enabled()}
        modes["torch autocast"] = torch.is_autocast_enabled("cpu")
        unusual |= {name: "on" for name, is_on in modes.items() if is_on}
        if (found := torch.get_default_device()).type != "cpu":
            unusual["torch default device"] = str(found)
    return unusual


class SharedSettings:
    """Settings shared by all threads. The first thread to compute sets them, and the last one restores them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._computing = 0
        self._settings: list[Setting] = []
        self._before: list[Any] = []

    @contextmanager
    def kept(self, settings: list[Setting]) -> Generator[None]:
        with self._lock:
            if self._computing:  # rollouts within a stage that computes on a GPU keep its settings
                outer = {setting.name: setting for setting in self._settings}
                settings = [outer.get(setting.name, setting) for setting in settings]
            before = _set_normal(settings)
            if not self._computing:
                self._settings, self._before = settings, before
            self._computing += 1
        try:
            yield
        finally:
            with self._lock:
                self._computing -= 1
                if not self._computing:
                    _restore(self._settings, self._before)


_shared = SharedSettings()


def _set_normal(settings: list[Setting]) -> list[Any]:
    """Reset settings with unusual values to normal ones, and return the previous values of all settings."""
    before = [setting.get() for setting in settings]
    for setting, value in zip(settings, before, strict=True):
        if value not in setting.normal:
            setting.set(setting.normal[0])
    return before


def _restore(settings: list[Setting], before: list[Any]) -> None:
    for setting, value in zip(settings, before, strict=True):
        if setting.get() != value:
            setting.set(value)


def _of_thread(torch: Any) -> list[Setting]:
    settings = [Setting("flush to zero", _flushes_to_zero, _flush_to_zero, (False,))]
    if torch is not None:
        settings += [
            Setting("torch gradients", torch.is_grad_enabled, torch.set_grad_enabled, (True,)),
            Setting("torch threads", torch.get_num_threads, torch.set_num_threads, (1,)),
            # On a GPU, gradients summed in torch's own thread would be added in an order that depends on other threads.
            Setting(
                "autograd threads",
                torch.autograd.is_multithreading_enabled,
                torch.autograd.set_multithreading_enabled,
                (False,),
            ),
        ]
    return settings


def _of_process(torch: Any, device: DeviceName) -> list[Setting]:
    return _of_blas() if torch is None else [*_of_blas(), *_of_torch(torch, device)]


@cache
def _of_blas() -> list[Setting]:
    found = [library for library in ThreadpoolController().lib_controllers if library.user_api == "blas"]
    return [Setting("BLAS threads", lib.get_num_threads, lib.set_num_threads, (1,)) for lib in found]


@cache
def _of_torch(torch: Any, device: DeviceName) -> list[Setting]:
    return [
        Setting("torch default dtype", torch.get_default_dtype, torch.set_default_dtype, (torch.float32,)),
        Setting(
            "torch deterministic algorithms",
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
            (device != "cpu",),
        ),
        Setting("mkldnn", *_attribute(torch.backends.mkldnn, "enabled"), (True,)),
        Setting("torch float32 precision", partial(_precision, torch), partial(_set_precision, torch), ("highest",)),
        *_precisions(torch.backends, device),
    ]


_MIXED = "set by product"


def _precision(torch: Any) -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # precision was set separately for some kinds of products, see `_precisions`
        return _MIXED


def _set_precision(torch: Any, value: str) -> None:
    if value != _MIXED:
        torch.set_float32_matmul_precision(value)


def _precisions(backends: Any, device: DeviceName) -> Iterator[Setting]:
    """Yield the precision settings that torch has per kind of product and, on CUDA, cuDNN's benchmark setting."""
    parts = {f"mkldnn {name}": getattr(backends.mkldnn, name, None) for name in ("matmul", "conv", "rnn")}
    if device == "cuda":
        parts |= {f"cudnn {name}": getattr(backends.cudnn, name, None) for name in ("conv", "rnn")}
        yield Setting("cudnn benchmark", *_attribute(backends.cudnn, "benchmark"), (False,))
    for name, part in parts.items():
        if hasattr(part, "fp32_precision"):
            yield Setting(f"{name} precision", *_attribute(part, "fp32_precision"), ("ieee", "none"))


def _attribute(of: object, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return a getter and a setter for an attribute."""
    return partial(getattr, of, name), partial(setattr, of, name)


def _flushes_to_zero() -> bool:
    return _SMALLEST_NORMAL / 2 == 0 or _DENORMAL * 2.0**60 == 0


def _flush_to_zero(on: bool) -> None:
    # Other code may have changed it, but only torch can set it.
    importlib.import_module("torch").set_flush_denormal(on)
