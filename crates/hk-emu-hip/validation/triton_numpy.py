"""Triton's own HIP driver and launcher with NumPy arrays for tensors: no PyTorch, no GPU, no ROCm.

    import triton_numpy as gpu            # a device for each target in HK_EMU_ARCH; gfx942 and gfx950 if it is not set
    x, y = gpu.array(host), gpu.empty(host.shape, host.dtype)
    kernel[grid](x, y, n, BLOCK=1024)     # any @triton.jit function
    print(y.numpy())

Import it before anything asks Triton for its driver. The library is `target/hip/lib/libamdhip64.so` of `cargo xtask hip-runtime`,
or TRITON_LIBHIP_PATH. A kernel that faults raises `Fault` at the next call here; the report is on stderr.
"""

import ctypes
import os
import pathlib
import time

import ml_dtypes  # noqa: F401  (NumPy's bfloat16 and fp8)
import numpy as np

LIBRARY = pathlib.Path(__file__).resolve().parents[3] / "target/hip/lib/libamdhip64.so"
os.environ.setdefault("TRITON_LIBHIP_PATH", str(LIBRARY))
os.environ.setdefault("HK_EMU_ARCH", "gfx942,gfx950")
os.environ.setdefault("HK_EMU_ASSERT", "error")

import triton  # noqa: E402
from triton.backends.amd.driver import HIPDriver, HIPLauncher, HIPUtils  # noqa: E402

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2

hip = ctypes.CDLL(os.environ["TRITON_LIBHIP_PATH"])
hip.hipGetErrorName.restype = ctypes.c_char_p


class Fault(RuntimeError):
    """An error code of the runtime."""


def call(name, *args):
    code = getattr(hip, name)(*args)
    if code:
        raise Fault(f"{name}: {hip.hipGetErrorName(code).decode()}")


def device_count():
    count = ctypes.c_int()
    call("hipGetDeviceCount", ctypes.byref(count))
    return count.value


def device():
    number = ctypes.c_int()
    call("hipGetDevice", ctypes.byref(number))
    return number.value


def use(number):
    """Makes a device the current one; its target."""
    call("hipSetDevice", ctypes.c_int(number))
    return triton.runtime.driver.active.get_current_target().arch


def synchronize():
    call("hipDeviceSynchronize")


def reset():
    """Forgets the fault of a kernel, and frees the device's memory."""
    call("hipDeviceReset")


class Type(str):
    """An element's type by name, with what Triton asks of PyTorch's types. Triton keeps types by hash, and would take the fp8 types of
    ml_dtypes for one another."""

    def __new__(cls, dtype):
        self = super().__new__(cls, dtype.name)
        self.itemsize, self.is_floating_point = dtype.itemsize, "float" in dtype.name
        return self


class Array:
    """A row-major array in the memory of the current device."""

    def __init__(self, shape, dtype):
        self.shape, self.element = tuple(shape), np.dtype(dtype)
        self.dtype = Type(self.element)
        self.size = int(np.prod(self.shape))
        self.nbytes = self.size * self.element.itemsize
        self.pointer = ctypes.c_void_p()
        call("hipMalloc", ctypes.byref(self.pointer), ctypes.c_size_t(max(self.nbytes, 1)))

    def __del__(self):
        if self.pointer:
            hip.hipFree(self.pointer)

    @property
    def strides(self):
        """In elements, as of tensors."""
        return tuple(int(np.prod(self.shape[i + 1 :], initial=1)) for i in range(len(self.shape)))

    def stride(self, axis):
        return self.strides[axis]

    def data_ptr(self):
        return self.pointer.value

    def ptr_range(self):
        return self.nbytes

    def element_size(self):
        return self.element.itemsize

    def numpy(self):
        host = np.empty(self.shape, self.element)
        call("hipMemcpy", ctypes.c_void_p(host.ctypes.data), self.pointer, ctypes.c_size_t(self.nbytes), DEVICE_TO_HOST)
        return host

    def fill(self, host):
        host = np.ascontiguousarray(host, self.element)
        assert host.shape == self.shape, f"{host.shape} for {self.shape}"
        call("hipMemcpy", self.pointer, ctypes.c_void_p(host.ctypes.data), ctypes.c_size_t(self.nbytes), HOST_TO_DEVICE)
        return self


def empty(shape, dtype=np.float32):
    """Memory that nobody has written: reading it is what the sanitizer `uninit` finds."""
    return Array(shape, dtype)


def array(host):
    host = np.asarray(host)
    return Array(host.shape, host.dtype).fill(host)


def zeros(shape, dtype=np.float32):
    return array(np.zeros(shape, dtype))


class Driver(HIPDriver):
    """Triton's driver; the current device and stream come from the runtime and not from PyTorch."""

    def __init__(self):
        self.utils, self.launcher_cls = HIPUtils(), HIPLauncher
        self.get_current_device, self.set_current_device = device, use
        self.get_current_stream = lambda _: 0

    def get_device_interface(self):
        raise NotImplementedError("this driver is without PyTorch")

    def get_benchmarker(self):
        """For `triton.autotune`: the time of one emulated launch, which says nothing about a GPU's."""

        def once(kernel_call, quantiles=None, **_):
            start = time.perf_counter()
            kernel_call()
            synchronize()
            seconds = time.perf_counter() - start
            return [1e3 * seconds] * len(quantiles) if quantiles else 1e3 * seconds

        return once


triton.runtime.driver.set_active(Driver())
