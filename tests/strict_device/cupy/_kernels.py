"""Kernels written in C (CuPy: _core/_kernel.pyx, _core/_reduction.pyx): their text is really run.

A call is one launch. `_gcc.py` compiles the text as C++, and runs it.
"""

import re

import numpy as np

from . import _counters
from ._gcc import computed
from ._storage import Storage, operand


class Parameter:
    """One of "T x, raw int64 order" (_kernel.pyx:ParameterInfo)."""

    def __init__(self, text: str):
        *words, kind, self.name = text.split()
        if set(words) - {"raw"}:
            raise Exception(f"Unknown keyword {words}")
        self.raw, self.letter = "raw" in words, kind if len(kind) == 1 else None
        self.dtype = None if self.letter else np.dtype(kind)


def parameters(text: str) -> list[Parameter]:
    return [Parameter(one) for one in text.split(",")] if text else []


def letters(given: list[tuple[Parameter, object]]) -> dict[str, np.dtype]:
    """Return the dtype of each letter, outputs first (_kernel.pyx:_decide_params_type_core)."""
    found = {}
    for p, x in given:
        if isinstance(x, np.ndarray):
            want = p.dtype or found.setdefault(p.letter, x.dtype)
            if x.dtype != want:
                raise TypeError(f"Type is mismatched. {p.name} {x.dtype} {want}")
    return found


def scalar(value, dtype) -> np.ndarray:
    """Store a number as this dtype (_scalar.pyx:CScalar.apply_dtype)."""
    stored = np.empty((), dtype)
    stored[()] = value
    return stored


class Kernel:
    def __init__(self, in_params: str, out_params: str, name: str, preamble: str):
        if not re.fullmatch(r"[a-zA-Z_]\w*", name):
            raise ValueError(f'Invalid kernel name: "{name}"')
        self.inputs, self.outputs = parameters(in_params), parameters(out_params)
        self.name, self.preamble = name, preamble
        if any(p.raw for p in self.outputs):
            raise NotImplementedError("the stand-in has no raw outputs")

    def _take(self, args) -> tuple[list, list, dict]:
        """Return what the kernel reads and writes, host arrays and numbers; and letters' dtypes."""
        nin, nargs = len(self.inputs), len(self.inputs) + len(self.outputs)
        if len(args) not in (nin, nargs):
            raise TypeError(
                f"Wrong number of arguments for {self.name}: {nin} or {nargs} (with outputs), "
                f"but given {len(args)}"
            )
        if not all(isinstance(x, Storage) for x in args[nin:]):
            raise TypeError("Output arguments type must be cupy.ndarray")
        inputs = [operand(x) for x in args[:nin]]
        outputs = [operand(x, writes=True) for x in args[nin:]]
        given = [*zip(self.outputs, outputs, strict=False), *zip(self.inputs, inputs, strict=True)]
        return inputs, outputs, letters(given)

    def _shape(self, *arrays) -> tuple[int, ...]:
        """Broadcast all arrays that are not raw (_kernel.pyx:_broadcast)."""
        given = zip([*self.inputs, *self.outputs], arrays, strict=False)
        found = [x.shape for p, x in given if isinstance(x, np.ndarray) and not p.raw]
        if not found:
            raise ValueError("Loop size is undecided.")
        return np.broadcast_shapes(*found)

    def _made(self, shape, types) -> list[Storage]:
        """Return new outputs of this shape."""
        import cupy

        return [cupy.empty(shape, p.dtype or types[p.letter]) for p in self.outputs]

    def _launch(self, inputs, results, types, shape, order, length: int) -> None:
        """Compute `length` elements of `shape` into each one of the results."""
        outputs = [operand(x, writes=True) for x in results]
        count, variables = outputs[0].size, {}
        _counters.launched(count)
        if count:
            for p, x in zip(self.inputs, inputs, strict=True):
                if not isinstance(x, np.ndarray):
                    variables[p.name] = scalar(x, p.dtype or types[p.letter])
                elif p.raw:
                    variables[p.name] = x.reshape(-1)
                else:
                    variables[p.name] = np.broadcast_to(x, shape).transpose(order).flatten()
            for p, y in zip(self.outputs, outputs, strict=True):
                variables[p.name] = y.flatten()
            written = computed(self, variables, types, count, length)
            for p, y in zip(self.outputs, outputs, strict=True):
                y[...] = written[p.name].reshape(y.shape)


class ElementwiseKernel(Kernel):
    """Run `operation` for each element (_kernel.pyx:ElementwiseKernel); `i` is its index."""

    elementwise = True

    def __init__(
        self,
        in_params,
        out_params,
        operation,
        name="kernel",
        reduce_dims=True,
        preamble="",
        no_return=False,
        return_tuple=False,
    ):
        super().__init__(in_params, out_params, name, preamble)
        self.texts = {"operation": operation}
        self.no_return, self.return_tuple = no_return, return_tuple
        if "i" in [p.name for p in self.inputs + self.outputs]:
            raise ValueError("Can not use 'i' as a parameter name")

    def __call__(self, *args, size=-1, stream=None, block_size=128):
        inputs, outputs, types = self._take(args)
        shape = self._shape(*inputs, *outputs) if size == -1 else (size,)
        for x in outputs:
            if x.shape != shape:
                raise ValueError(f"Out shape is mismatched: {x.shape} for {shape}")
        self._check_overlap(inputs, outputs)
        results = list(args[len(inputs) :]) or self._made(shape, types)
        self._launch(inputs, results, types, shape, range(len(shape)), 1)
        if self.no_return:
            return None
        return results[0] if len(results) == 1 and not self.return_tuple else tuple(results)

    def _check_overlap(self, inputs, outputs) -> None:
        """Refuse what is undefined: an element that one thread reads and another one writes."""
        for p, x in zip(self.inputs, inputs, strict=True):
            for y in outputs if isinstance(x, np.ndarray) else []:
                same = x.ctypes.data == y.ctypes.data and x.strides == y.strides
                if (p.raw or not same) and np.shares_memory(x, y):
                    raise ValueError(f"{self.name}: {p.name} overlaps an output")


class ReductionKernel(Kernel):
    """Combine the elements along an axis (_reduction.pyx:ReductionKernel), here in a binary tree.

    `a` and `b` are a macro's parameters in reduce_expr and post_map_expr, so that no field may have
    these names (_reduction.pyx:_create_reduction_function_code).
    """

    elementwise = False

    def __init__(
        self,
        in_params,
        out_params,
        map_expr,
        reduce_expr,
        post_map_expr,
        identity,
        name="reduce_kernel",
        reduce_type=None,
        reduce_dims=True,
        preamble="",
        options=(),
    ):
        super().__init__(in_params, out_params, name, preamble)
        self.texts = {"each": map_expr, "combine": reduce_expr, "finish": post_map_expr}
        self.texts |= {"identity": identity, "kind": reduce_type or self.outputs[0].letter}
        if re.search(r"\.\s*[ab]\b", reduce_expr) or re.search(r"\.\s*a\b", post_map_expr):
            raise SyntaxError("a field named like a parameter of the macro")
        if any(p.raw for p in self.inputs):
            raise NotImplementedError("the stand-in reduces no raw arrays")

    def __call__(self, *args, out=None, axis=None, keepdims=False, stream=None):
        if out is not None and len(self.outputs) != 1:
            raise NotImplementedError("")
        inputs, outputs, types = self._take(args if out is None else (*args, out))
        shape = self._shape(*inputs)
        axes = range(len(shape)) if axis is None else np.atleast_1d(axis) % len(shape)
        reduced = sorted(int(n) for n in axes)
        kept = [n for n in range(len(shape)) if n not in reduced]
        short = [1 if n in reduced else side for n, side in enumerate(shape)]
        final = tuple(short if keepdims else [shape[n] for n in kept])
        if any(y.shape != final for y in outputs):
            raise ValueError(f"Out shape is mismatched: not {final}")
        results = list(args[len(inputs) :]) or ([out] if outputs else self._made(final, types))
        length = int(np.prod([shape[n] for n in reduced]))
        self._launch(inputs, results, types, shape, reduced + kept, length)
        return results[0]
