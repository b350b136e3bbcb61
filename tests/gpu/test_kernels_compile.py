"""The C text of every kernel is CUDA: NVRTC compiles it, without a GPU, where it is installed."""

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minidist import nn, optim
from minidist.autograd.kernels import layers
from minidist.backend import to_device, widen
from minidist.rng import Randomness
from tests.strategies import arrays
from tests.strict_device.all_kernels import all_kernels

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_nvrtc_compiles_every_kernel():
    """CUPY_PYTHON names a Python that has CuPy and NVRTC, if this one has not."""
    python = os.environ.get("CUPY_PYTHON", sys.executable)
    if python == sys.executable and importlib.util.find_spec("cupy_backends") is None:
        pytest.skip("CuPy is not installed here, and CUPY_PYTHON names no Python that has it")
    command = [python, "-m", "tests.strict_device.compile_kernels"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len(done.stdout.splitlines()) > 50


SOURCE = """
#include <cmath>
#include <cstddef>
using std::exp, std::log, std::sqrt, std::tanh, std::erf;
#define __device__
typedef _Float16 float16;
{letters}
{preamble}
typedef {kind} Kind;
#define REDUCE(a, b) ({combine})
#define POST_MAP(a) {finish}
extern "C" void run(long count, long length, void** _p) {{
    for (long _o = 0; _o < count; _o++) {{
        Kind _s = Kind({identity});
        for (long _j = 0; _j < length; _j++) {{
            long i = _j * count + _o;
            {inputs}
            {outputs}
            {each}
        }}
        long i = _o;
        {scalars}
        {outputs}
        POST_MAP(_s);
    }}
}}"""
NAMES = {
    "int64": "long long",
    "uint64": "unsigned long long",
    "int32": "int",
    "uint8": "unsigned char",
    "float16": "float16",
    "float32": "float",
    "float64": "double",
}


def source(kernel, variables, types) -> str:
    """Return C++ that runs a kernel's text in a loop: an elementwise one has `length` 1."""
    lines = {"inputs": "", "outputs": "", "scalars": ""}
    for at, p in enumerate(kernel.inputs + kernel.outputs):
        x, output = variables[p.name], p in kernel.outputs
        kind = ("" if output else "const ") + (p.letter or NAMES[p.dtype.name])
        name, end = ("*" + p.name, "") if p.raw else ("&" + p.name, "[i]" if x.ndim else "[0]")
        line = f"{kind} {name} = ((({kind}*)_p[{at}])){end}; "
        lines["outputs" if output else "inputs"] += line
        lines["scalars"] += "" if output or p.raw or x.ndim else line
    if hasattr(kernel, "operation"):
        texts = {"each": f"{kernel.operation};", "kind": "int", "identity": "0"}
        texts |= {"combine": "0", "finish": ""}
    else:
        texts = {"each": f"_s = REDUCE(_s, static_cast<Kind>({kernel.map}));", "kind": kernel.kind}
        texts |= {"combine": kernel.reduce, "finish": f"({kernel.finish})"}
        texts |= {"identity": kernel.identity}
    letters = "".join(f"typedef {NAMES[t.name]} {letter};" for letter, t in types.items())
    return SOURCE.format(letters=letters, preamble=kernel.preamble, **texts, **lines)


@functools.cache
def library(folder, code):
    """Return the function `run` of a C++ source, as g++ compiles it."""
    name = folder / hashlib.sha1(code.encode()).hexdigest()
    name.with_suffix(".cpp").write_text(code)
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
    subprocess.run(["g++", *flags, "-o", name, name.with_suffix(".cpp")], check=True)
    return ctypes.CDLL(str(name)).run


def by_gcc(folder, kernel, variables, types, count, length) -> dict:
    """Run a kernel's text as C++ on what the stand-in's threads start from; return its outputs."""
    used = kernel.inputs + kernel.outputs
    given = [
        np.array(variables[p.name].flat if p.raw else variables[p.name], order="C") for p in used
    ]
    pointers = (ctypes.c_void_p * len(given))(*[x.ctypes.data for x in given])
    run = library(folder, source(kernel, variables, types))
    run(ctypes.c_long(count), ctypes.c_long(length), pointers)
    return {p.name: x for p, x in zip(used, given, strict=True) if p in kernel.outputs}


@pytest.fixture
def compared(gpu, tmp_path, monkeypatch):
    """Let every launch on the stand-in be compared with the C++ of g++; return the names."""
    stand_in = pytest.importorskip("cupy")
    if not hasattr(stand_in, "_counters") or shutil.which("g++") is None:
        pytest.skip("this compares the stand-in for CuPy with g++, and one of them is not here")
    names = set()
    for kind in (stand_in.ElementwiseKernel, stand_in.ReductionKernel):
        compute = kind._compute

        def both(kernel, variables, types, count, length, compute=compute):
            want = by_gcc(tmp_path, kernel, variables, types, count, length)
            got = compute(kernel, dict(variables), types, count, length)
            for name, x in want.items():
                close = 1e-5 if x.dtype == np.float32 else 1e-12
                close *= abs(x[np.isfinite(x)].astype(float)).max(initial=1e-30)
                np.testing.assert_allclose(got[name], x, rtol=0, atol=close, err_msg=kernel.name)
            names.add(kernel.name)
            return got

        monkeypatch.setattr(kind, "_compute", both)
    return names


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_stand_in_computes_what_gcc_makes_of_the_text(dtype, compared):
    tokens = np.random.default_rng(0).integers(0, 9, (3, 150))
    rules = [optim.AdamW, optim.Adagrad, optim.SGD, lambda p, lr: optim.SGD(p, lr, momentum=0.9)]
    for rule in rules:
        model = nn.Transformer(9, 8, 2, 1, 150, dtype=dtype, dropout=0.2).to("gpu")
        optimizer = rule(model.parameters(), lr=0.1)
        T = 150 if rule is optim.AdamW else 5
        for step in range(2):
            logits = model(tokens[:, :T], Randomness(0, step, np.arange(3)))
            nn.cross_entropy(logits, to_device(tokens[:, :T], "gpu")).backward()
            optimizer.clip_global_norm(0.5)
            optimizer.step()
            optimizer.zero_grad()
    x = to_device(arrays(4, 5, dtype=dtype), "gpu")
    layers.relu_backward(x, layers.relu(x))
    layers.gelu_erf_backward(x, widen(x), layers.gelu_erf(x)[1])
    assert compared == {kernel.name for kernel in all_kernels()}
