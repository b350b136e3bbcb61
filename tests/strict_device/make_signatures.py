"""Print the signatures of the names in use, as the installed CuPy wheel has them.

    python make_signatures.py > signatures/cupy-14.txt        (in an environment with that wheel)

It needs neither a GPU nor a driver: CuPy's Cython functions carry their signature in the first line
of their docstring. A ufunc's line also has its loops (`ff->f`), in the order in which CuPy tries
them. The stand-in reads these loops; a test compares its functions with the signatures.
"""

import inspect
import re

MODULES = {
    "cupy": """arange array asarray ascontiguousarray asnumpy broadcast_to concatenate empty
        empty_like expand_dims full full_like get_array_module is_available moveaxis ones ones_like
        split stack swapaxes take take_along_axis tril triu where zeros zeros_like
        append argmax argsort array_equal copyto cumsum max min sum mean
        get_default_memory_pool matmul ElementwiseKernel ReductionKernel""",
    "cupy.ndarray": """all any argmax argsort astype copy cumsum dot fill flatten get item max mean
        min prod ravel reshape set squeeze sum swapaxes take tobytes tolist transpose view""",
    "cupy.ufunc": "at reduce accumulate reduceat outer",
    "cupy.cuda": "Device Event MemoryPointer Stream get_current_stream get_elapsed_time",
    "cupy.cuda.Device": "use synchronize",
    "cupy.cuda.Event": "record synchronize",
    "cupy.cuda.Stream": "record synchronize use wait_event",
    "cupy.cuda.MemoryPointer": "copy_from_device_async copy_from_host_async copy_to_host_async",
    "cupy.cuda.runtime": """deviceCanAccessPeer deviceSynchronize free getDevice getDeviceCount
        ipcCloseMemHandle ipcGetMemHandle ipcOpenMemHandle malloc memcpy memcpyAsync
        memGetInfo setDevice""",
}
UFUNCS = """absolute add bitwise_and bitwise_or bitwise_xor copysign cos divide equal exp exp2 expm1
    floor_divide greater greater_equal invert isfinite isinf isnan left_shift less less_equal log
    log1p logical_and logical_not logical_or logical_xor maximum minimum multiply negative not_equal
    positive power reciprocal remainder right_shift sign sin sqrt square subtract tanh
    true_divide""".split()


def lines(cupy) -> list[str]:
    """Return one line per name: `cupy.sum(a, axis=None, ...)`, a ufunc's with its loops."""
    result = []
    for module, names in MODULES.items():
        holder = find(cupy, module)
        result += [f"{module}.{name}{signature(getattr(holder, name))}" for name in names.split()]
    for name in UFUNCS:
        ufunc = getattr(cupy, name)
        result.append(f"cupy.{name}{signature(ufunc)} {' '.join(ufunc.types)}")
    import cupyx.scipy.special

    erf = cupyx.scipy.special.erf
    return [*result, f"cupyx.scipy.special.erf(x, /) {' '.join(erf.types)}"]


def find(cupy, path: str):
    holder = cupy
    for name in path.split(".")[1:]:
        holder = getattr(holder, name)
    return holder


def signature(function) -> str:
    """Return `(names=defaults)` without types, from the object or from its docstring."""
    try:
        found = inspect.signature(function)
        bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
        return str(inspect.Signature(bare)).replace("<class 'float'>", "float")
    except (ValueError, TypeError):
        return from_docstring(function.__doc__)


def from_docstring(text: str) -> str:
    """Return the parameters in a docstring's first line: names and defaults, no Cython types."""
    first = text.strip().splitlines()[0].replace("\\*", "*")
    found = re.search(r"\((.*)\)", first)
    if not found:
        return "(...)"
    parts = [part.strip() for part in found.group(1).split(", ")]
    typeless = [re.sub(r"^(?:[\w.]+(?: \w+)* )(?=[\w])", "", part) for part in parts]
    return f"({', '.join(typeless)})".replace("u'", "'")


if __name__ == "__main__":
    import cupy

    print("\n".join(lines(cupy)))
