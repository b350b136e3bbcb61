"""Run a kernel's text as C++, compiled by g++. Not a part of CuPy.

What a kernel should not do is an error: to mix float and double (a GPU would compute in double,
slowly), to write to an input, to lose digits in braces, to read outside a raw array.
"""

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np

FLAGS = "-std=c++17 -O1 -ffp-contract=off -fPIC -shared".split()
FLAGS += ["-Werror=double-promotion", "-Werror=narrowing"]
KINDS = {
    "bool": "bool", "int8": "signed char", "uint8": "unsigned char", "int32": "int",
    "uint32": "unsigned int", "int64": "long long", "uint64": "unsigned long long",
    "float16": "_Float16", "float32": "float", "float64": "double",
}  # fmt: skip
HEAD = """
#include <cmath>
#include <cstddef>
using std::exp, std::log, std::sqrt, std::tanh, std::erf;
#define __device__
typedef _Float16 float16;
{letters}
template <class E> struct Raw {{
    const E* at; long size; bool* outside;
    const E& operator[](long i) const {{
        static const E none{{}};
        if (0 <= i && i < size) return at[i];
        *outside = true;
        return none;
    }}
}};
{preamble}
"""
ELEMENTWISE = """
extern "C" bool run(long count, long length, void** _p, long* _sizes) {{
    bool _outside = false;
    for (long _n = 0; _n < count; _n++) {{
        const long long i = _n;
        {parameters}
        {operation};
    }}
    return _outside;
}}"""
REDUCTION = """
typedef {kind} Kind;
static Kind combined(Kind a, Kind b) {{ return static_cast<Kind>({combine}); }}
static Kind total(long count, long begin, long end, long _o, void** _p, long* _sizes) {{
    if (end - begin > 1) {{
        long middle = begin + (end - begin) / 2;
        Kind low = total(count, begin, middle, _o, _p, _sizes);
        return combined(low, total(count, middle, end, _o, _p, _sizes));
    }}
    const long long i = begin * count + _o;
    {parameters}
    return static_cast<Kind>({each});
}}
extern "C" bool run(long count, long length, void** _p, long* _sizes) {{
    for (long long i = 0; i < count; i++) {{
        Kind a = Kind({identity});
        if (length) a = combined(a, total(count, 0, length, i, _p, _sizes));
        {at_the_end}
        {finish};
    }}
    return false;
}}"""


def source(kernel, variables: dict, types: dict) -> str:
    """Return C++ that runs a kernel's text in a loop, a reduction's as a binary tree."""
    lines, numbers = [], []
    for n, p in enumerate(kernel.inputs + kernel.outputs):
        x, output = variables[p.name], p in kernel.outputs
        kind = ("" if output else "const ") + (p.letter or KINDS[p.dtype.name])
        line = f"{kind}& {p.name} = (({kind}*)_p[{n}])[{'i' if x.ndim else 0}];"
        if p.raw:
            line = f"const Raw<{kind}> {p.name}{{({kind}*)_p[{n}], _sizes[{n}], &_outside}};"
        if not output or kernel.elementwise:
            lines.append(line.replace("Raw<const ", "Raw<"))
        if output or not x.ndim:
            numbers.append(line)
    letters = "".join(f"typedef {KINDS[t.name]} {letter};\n" for letter, t in types.items())
    text = ELEMENTWISE if kernel.elementwise else REDUCTION
    return HEAD.format(letters=letters, preamble=kernel.preamble) + text.format(
        parameters="\n".join(lines), at_the_end="\n".join(numbers), **kernel.texts
    )


@functools.cache
def library(code: str):
    """Return the function `run` of a C++ text; processes share what was compiled once."""
    folder = Path(tempfile.gettempdir()) / f"strict_device_{os.getuid()}"
    folder.mkdir(exist_ok=True)
    path = folder / f"{hashlib.sha1((code + str(FLAGS)).encode()).hexdigest()}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as own:
            text, made = Path(own, "text.cpp"), Path(own, "made.so")
            text.write_text(code)
            command = ["g++", *FLAGS, "-o", str(made), str(text)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SyntaxError(f"g++ refuses the kernel: {done.stderr[:2000]}")
            made.replace(path)
    return ctypes.CDLL(str(path)).run


def computed(kernel, variables: dict, types: dict, count: int, length: int) -> dict:
    """Run a kernel on its parameters' arrays, by name; return what it has written."""
    used = kernel.inputs + kernel.outputs
    given = [np.array(variables[p.name], order="C") for p in used]
    pointers = (ctypes.c_void_p * len(given))(*[x.ctypes.data for x in given])
    sizes = (ctypes.c_long * len(given))(*[x.size for x in given])
    run = library(source(kernel, variables, types))
    run.restype = ctypes.c_bool
    if run(ctypes.c_long(count), ctypes.c_long(length), pointers, sizes):
        raise IndexError(f"{kernel.name} reads outside a raw array")
    return {p.name: x for p, x in zip(used, given, strict=True) if p in kernel.outputs}
