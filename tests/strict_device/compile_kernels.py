"""Compile the C text of every kernel with NVRTC, in the source that CuPy itself writes around it.

    python -m tests.strict_device.compile_kernels

Run it where CuPy 13 or 14 is installed with NVRTC and the headers of CUDA (the wheels
nvidia-cuda-nvrtc-cu12 and nvidia-cuda-runtime-cu12, or CUDA_PATH); it needs neither a GPU nor a
driver. It prints a line per kernel and dtype, with what the compiler said. That float32 is computed
in double is an error, but where it is meant to be.
"""

import importlib
import os
import pkgutil
from pathlib import Path

import cupy
import numpy as np
from cupy._core import _carray, _kernel, _reduction, _scalar, core
from cupy_backends.cuda.libs import nvrtc

from minidist.autograd import kernels
from minidist.autograd.kernels import launch

ARRAY, INDEXER, SCALAR = 1, 2, 3  # _kernel.pxd:_ArgKind
DOUBLE = {"sum_of_squares", "clip", "sum_runs"}  # these are to compute in double
HALF = {"rows_of", "sum_runs", "relu_backward", "clip"}  # these are to take float16, too
NUMBERS = """b1 b2 columns decay eps factor hidden kept l2 lr mu outside rate rest1 rest2 scale
size""".split()  # parameters without a dtype of their own, for which calls pass numbers
HEADERS = ("complex.cuh", "carray.cuh", "atomics.cuh", "math_constants.h")
WHEEL = Path(cupy.__file__).parents[1] / "nvidia" / "cuda_runtime"
OPTIONS = (
    "--std=c++17",
    "-arch=compute_80",
    "-ftz=true",
    "--device-as-default-execution-space",
    f"-I{core._get_header_dir_path()}",
    f"-I{os.environ.get('CUDA_PATH', WHEEL)}/include",
    *core._get_cccl_include_options(),
)


def all_kernels() -> list[launch.Elementwise | launch.Reduction]:
    """Return every Elementwise and Reduction of the library, found where the modules define it."""
    names = [found.name for found in pkgutil.iter_modules(kernels.__path__)]
    modules = [importlib.import_module(f"{kernels.__name__}.{name}") for name in names]
    kinds = launch.Elementwise | launch.Reduction
    return [x for module in modules for x in vars(module).values() if isinstance(x, kinds)]


def argument(parameter, dtype: np.dtype, output: bool):
    """Describe what a call passes for a parameter: an array, or a number."""
    if output or parameter.raw or (parameter.ctype in "IT" and parameter.name not in NUMBERS):
        return _kernel._ArgInfo(ARRAY, cupy.ndarray, dtype, 2, True, True)
    return _kernel._ArgInfo(SCALAR, _scalar.CScalar, dtype, 0, True, True)


def source(kernel, letters: dict[str, np.dtype]) -> str:
    """Return what CuPy would compile for these dtypes, from _kernel.pyx and _reduction.pyx."""
    ins = _kernel._get_param_info(kernel.inputs, True)
    outs = _kernel._get_param_info(kernel.outputs, False)
    used = sorted({p.ctype for p in ins + outs if p.dtype is None})
    pairs = tuple((letter, letters[letter]) for letter in used)
    infos = tuple(
        argument(p, letters[p.ctype] if p.dtype is None else np.dtype(p.dtype), p in outs)
        for p in ins + outs
    )
    indexer = _kernel._ArgInfo(INDEXER, _carray.Indexer, None, 2, True, True)
    if isinstance(kernel, launch.Elementwise):
        rest = _kernel._get_param_info("CIndexer _ind", False)
        return _kernel._get_elementwise_kernel_code(
            (*infos, indexer), _kernel._TypeMap(pairs), ins + outs + rest, kernel.text,
            kernel.name, "",
        )  # fmt: skip
    pairs += (("IndexT", np.dtype("int32")),)
    rest = _kernel._get_param_info("CIndexer _in_ind, CIndexer _out_ind", False)
    rest += _kernel._get_param_info("int32 _block_stride", True)
    stride = _kernel._ArgInfo(SCALAR, _scalar.CScalar, np.dtype("int32"), 0, True, True)
    return _reduction._ReductionKernel_get_cached_function_code(
        len(ins), len(outs), ins + outs + rest, (*infos, indexer, indexer, stride),
        _kernel._TypeMap(pairs), kernel.name, 512, kernel.kind, kernel.identity, kernel.each,
        kernel.combine, kernel.finish, kernel.preamble, (),
    )  # fmt: skip


def compiled(code: str, name: str) -> tuple[str, str]:
    """Return the PTX and the compiler's words; SystemExit with both texts if it refuses."""
    code = "".join(f"#include <cupy/{header}>\n" for header in HEADERS) + code
    program = nvrtc.createProgram(code, f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, OPTIONS)
    except nvrtc.NVRTCError:
        raise SystemExit(code + nvrtc.getProgramLog(program)) from None
    return nvrtc.getPTX(program).decode(), nvrtc.getProgramLog(program).strip()


def main() -> None:
    print(f"CuPy {cupy.__version__}, NVRTC {nvrtc.getVersion()}")
    for kernel in all_kernels():
        for T in ["float32", "float64"] + ["float16"] * (kernel.name in HALF):
            for index in ("int64", "uint8"):
                letters = {"T": np.dtype(T), "I": np.dtype(index)}
                ptx, said = compiled(source(kernel, letters), kernel.name)
                entry = ptx.partition(".entry")[2]  # after the functions of the headers
                if T == "float32" and ".f64" in entry and kernel.name not in DOUBLE:
                    raise SystemExit(f"{kernel.name} computes float32 in double")
            print(f"{kernel.name:24} {T} {said}".rstrip())


if __name__ == "__main__":
    main()
