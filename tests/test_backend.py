"""Arrays of both devices, half precision, alignment."""

import importlib.util
import platform
import subprocess
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import backend
from tests.strategies import arrays, host, shapes

every_dtype = pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])


def test_arrays_go_to_a_device_and_back(device):
    x = arrays(2, 3)
    moved = backend.to_device(x, device)
    back = backend.to_host(moved)
    assert isinstance(back, np.ndarray)
    np.testing.assert_array_equal(back, x)
    assert backend.as_array(moved) is moved and backend.to_device(moved, device) is moved


@pytest.fixture
def fresh(monkeypatch):
    """Forget whether there is a GPU, before the test and after it."""
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    backend.why_no_gpu.cache_clear()
    yield
    backend.why_no_gpu.cache_clear()
    sys.modules.pop("cupy", None)


@pytest.fixture
def cupy_of(fresh, monkeypatch, tmp_path):
    """Return a function that lets `import cupy` run this code."""
    monkeypatch.syspath_prepend(tmp_path)
    return (tmp_path / "cupy.py").write_text


def test_without_cupy_the_reason_says_how_to_install_it(fresh, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'minidist\[gpu\]'"):
        backend.check_device("gpu")
    assert backend.gpus() == 0


NO_GPU = {
    "def is_available(): return False": "finds no usable GPU: check the driver",  # CuPy 14
    "def is_available(): raise RuntimeError('driver')": "finds no usable GPU",  # CuPy 13
    "raise ImportError('libcudart.so.12')": r"cannot be imported \(libcudart.so.12\)",
}


@pytest.mark.parametrize("code", NO_GPU)
def test_whatever_cupy_does_without_a_gpu_is_a_reason(cupy_of, code):
    cupy_of(code)
    with pytest.raises(ValueError, match=NO_GPU[code]):
        backend.check_device("gpu")


def gpus_there(number: int) -> str:
    """Return the code of a CuPy with this many GPUs, in which `used` is the current one."""
    return (
        "def is_available(): return True\n"
        "class cuda:\n"
        f"    class runtime: getDeviceCount = staticmethod(lambda: {number})\n"
        "    class Device:\n"
        "        def __init__(self, number): self.number = number\n"
        "        def use(self): cuda.used = self.number\n"
    )


def test_ranks_take_turns_on_the_gpus_unless_one_is_named(cupy_of):
    cupy_of(gpus_there(3))
    assert [backend.device_number("gpu", rank) for rank in range(5)] == [0, 1, 2, 0, 1]
    assert [backend.device_number("gpu:2", rank) for rank in range(3)] == [2, 2, 2]
    for device, used in (("gpu", 1), ("cpu", 1), ("gpu:0", 0)):
        backend.use_device(device, rank=4)
        assert sys.modules["cupy"].cuda.used == used


@pytest.mark.parametrize(
    ("number", "there"), [(1, "there is one GPU, gpu:0"), (4, "there are 4, gpu:0 to gpu:3")]
)
def test_a_gpu_that_does_not_exist_is_an_error_with_those_that_do(cupy_of, number, there):
    cupy_of(gpus_there(number))
    backend.check_device(f"gpu:{number - 1}")
    with pytest.raises(ValueError, match=f"'gpu:{number}' does not exist: {there}"):
        backend.check_device(f"gpu:{number}")


def test_a_device_that_is_none_is_an_error_whatever_the_machine_has():
    for device in ("cuda", "gpu:", "gpu:-1", "gpu:1.5", "gpu1", "cpu:0", ""):
        with pytest.raises(ValueError, match=f"unknown device '{device}'; choose one of cpu, gpu"):
            backend.check_device(device)


def test_a_thread_may_ask_for_modules_while_another_one_imports_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))  # nothing is in it yet
    x = np.ones(1)
    assert backend.array_module(x, 2.0) is np and not backend.on_gpu(x)
    assert backend.as_array([1]).tolist() == [1] and backend.to_host(2.5) == 2.5


@pytest.mark.gpu
def test_arrays_move_between_gpus():
    if backend.gpus() < 2:
        pytest.skip(f"{backend.gpus()} GPUs")
    x = arrays(2, 3)
    one, other = backend.to_device(x, "gpu:0"), backend.to_device(x, "gpu:1")
    assert (one.device.id, other.device.id) == (0, 1)
    assert backend.on_device_of(one, other).device.id == 1 and backend.on_device_of(one, one) is one
    assert backend.to_device(other, "gpu").device.id == 0  # this thread's
    for part in (one, one[:, 1], one[:, ::2].T):
        np.testing.assert_array_equal(host(backend.to_device(part, "gpu:1")), host(part))


@pytest.mark.gpu
def test_a_copy_to_another_gpu_waits_for_the_streams_of_both():
    if backend.gpus() < 2:
        pytest.skip(f"{backend.gpus()} GPUs")
    cuda, there = backend.device_module("gpu").cuda, backend.to_device(np.zeros(1), "gpu:0")
    with cuda.Device(1), cuda.Stream(non_blocking=True):
        x = backend.to_device(np.ones(1000), "gpu:1")
        x += 1
        with cuda.Device(0), cuda.Stream(non_blocking=True):
            copy = backend.on_device_of(x, there)
        x += 1  # another stream than the one that copies
        backend.synchronize(x)
    assert (host(copy * 1) == 2).all() and (host(x) == 3).all()


@given(shape=shapes(min_side=0), dtype=st.sampled_from(["float16", "float32", "float64", "int64"]))
def test_empty_arrays_begin_on_a_cache_line(shape, dtype):
    x = backend.empty(shape, dtype)
    assert (x.shape, x.dtype) == (shape, dtype)
    assert x.size == 0 or x.ctypes.data % 64 == 0
    assert x.flags.c_contiguous
    x[...] = 1


@every_dtype
@pytest.mark.parametrize("with_out", [False, True])
def test_matmul_keeps_the_dtype(dtype, with_out, place):
    a, b = arrays(3, 40, dtype=dtype), arrays(40, 2, seed=1, dtype=dtype)
    out = place(np.empty((3, 2), dtype)) if with_out else None
    got = backend.matmul(place(a), place(b), out=out)
    assert got.dtype == dtype and (out is None or got is out)
    wide = a.astype("float64") @ b.astype("float64")
    np.testing.assert_allclose(
        host(got), wide, rtol=4 * np.finfo(dtype).eps, atol=1e-2 if dtype == "float16" else 1e-5
    )


PAGE_FAULTS = """
import resource, sys, threading
import numpy as np
from minidist import nn, optim
from minidist.backend import keep_freed_memory

def work():
    big = [np.ones(1 << 21) for _ in range(4)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        big[-1] = None
        big[-1] = np.ones(1 << 21)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

if sys.argv[1] == "kept":
    keep_freed_memory()
if sys.argv[1] == "training":
    optim.SGD(nn.MLP([1, 1]).parameters(), 0.1)
for _ in range(2):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is no glibc")
def test_a_thread_reuses_freed_memory_without_page_faults():
    """Ten arrays of 16 MB are 40,960 pages of 4 KB, or 80 of 2 MB; four fill a heap of glibc."""

    def faults(how):
        command = [sys.executable, "-c", PAGE_FAULTS, how]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [int(line) for line in done.stdout.split()]

    assert max(faults("kept")) < 20 < min(faults("given back"))
    assert max(faults("training")) < 20  # a script that has made an optimizer
