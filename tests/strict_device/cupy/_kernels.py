"""Kernels written in C (CuPy: _core/_kernel.pyx, _core/_reduction.pyx): their text is really run.

A call is one launch. `_c.py` parses the text, `_threads.py` runs it.
"""

import re

import numpy as np

from . import _counters
from ._storage import Storage, operand
from ._threads import Raw, Threads


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

    def _take(self, args) -> tuple[list, list]:
        """Return what the kernel reads and writes, as host arrays and numbers."""
        nin, nargs = len(self.inputs), len(self.inputs) + len(self.outputs)
        if len(args) not in (nin, nargs):
            raise TypeError(
                f"Wrong number of arguments for {self.name}: {nin} or {nargs} (with outputs), "
                f"but given {len(args)}"
            )
        for x in args[nin:]:
            if not isinstance(x, Storage):
                raise TypeError("Output arguments type must be cupy.ndarray")
        return [operand(x) for x in args[:nin]], [operand(x, writes=True) for x in args[nin:]]

    def _dtypes(self, inputs: list, outputs: list) -> dict[str, np.dtype]:
        return letters(
            [*zip(self.outputs, outputs, strict=False), *zip(self.inputs, inputs, strict=True)]
        )

    def _shape(self, inputs: list, outputs: list) -> tuple[int, ...]:
        """Broadcast all arrays that are not raw (_kernel.pyx:_broadcast)."""
        given = zip([*self.inputs, *self.outputs], [*inputs, *outputs], strict=False)
        arrays = [x for p, x in given if isinstance(x, np.ndarray) and not p.raw]
        if not arrays:
            raise ValueError("Loop size is undecided.")
        return np.broadcast_shapes(*[x.shape for x in arrays])


class ElementwiseKernel(Kernel):
    """Run `operation` for each element (_kernel.pyx:ElementwiseKernel); `i` is its index."""

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
        self.operation, self.no_return, self.return_tuple = operation, no_return, return_tuple
        if "i" in [p.name for p in self.inputs + self.outputs]:
            raise ValueError("Can not use 'i' as a parameter name")

    def __call__(self, *args, size=-1, stream=None, block_size=128):
        import cupy

        inputs, outputs = self._take(args)
        types = self._dtypes(inputs, outputs)
        shape = (size,) if size != -1 else self._shape(inputs, outputs)
        results = list(args[len(inputs) :])
        if not results:
            if size == -1 and any(p.raw for p in self.outputs):
                raise ValueError("Output array size is Undecided")
            results = [cupy.empty(shape, p.dtype or types[p.letter]) for p in self.outputs]
            outputs = [operand(x, writes=True) for x in results]
        for p, x in zip(self.outputs, outputs, strict=True):
            if not p.raw and x.shape != shape:
                raise ValueError(f"Out shape is mismatched: {x.shape} for {shape}")
        self._check_overlap(inputs, outputs)
        if 0 not in shape:
            self._run(inputs, outputs, shape, types)
        _counters.launched(int(np.prod(shape)))
        if self.no_return:
            return None
        return results[0] if len(results) == 1 and not self.return_tuple else tuple(results)

    def _check_overlap(self, inputs, outputs) -> None:
        """Refuse what is undefined: an element that one thread reads and another one writes."""
        for p, x in zip(self.inputs, inputs, strict=True):
            for y in outputs:
                same = isinstance(x, np.ndarray) and np.may_share_memory(x, y)
                in_place = (
                    same
                    and not p.raw
                    and (x.ctypes.data, x.strides, x.shape)
                    == (
                        y.ctypes.data,
                        y.strides,
                        y.shape,
                    )
                )
                if same and not in_place and np.shares_memory(x, y):
                    raise ValueError(f"{self.name}: {p.name} overlaps an output")

    def _run(self, inputs, outputs, shape, types) -> None:
        count = int(np.prod(shape))
        variables = {"i": np.arange(count)}
        for p, x in zip(self.inputs + self.outputs, inputs + outputs, strict=True):
            if not isinstance(x, np.ndarray):
                variables[p.name] = scalar(x, p.dtype or types[p.letter])
            elif p.raw:
                variables[p.name] = Raw(p.name, x.reshape(-1))
            else:
                variables[p.name] = np.broadcast_to(x, shape).flatten()
        constant = ["i", *(p.name for p in self.inputs)]
        threads = Threads(count, types, self.preamble, variables, constant)
        threads.run(self.operation)
        for p, y in zip(self.outputs, outputs, strict=True):
            y[...] = threads.variables[p.name].reshape(shape)


class ReductionKernel(Kernel):
    """Combine the elements along an axis (_reduction.pyx:ReductionKernel), here in a binary tree.

    `a` and `b` are a macro's parameters in reduce_expr and post_map_expr, so that no field may have
    these names (_reduction.pyx:_create_reduction_function_code).
    """

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
        self.map, self.reduce, self.finish = map_expr, reduce_expr, post_map_expr
        self.identity, self.kind = identity, reduce_type or self.outputs[0].letter
        if re.search(r"\.\s*[ab]\b", reduce_expr) or re.search(r"\.\s*a\b", post_map_expr):
            raise SyntaxError("a field named like a parameter of the macro")

    def __call__(self, *args, out=None, axis=None, keepdims=False, stream=None):
        import cupy

        if out is not None and len(self.outputs) != 1:
            raise NotImplementedError("")
        inputs, outputs = self._take(args if out is None else (*args, out))
        types = self._dtypes(inputs, outputs)
        shape = self._shape(inputs, [])
        axes = range(len(shape)) if axis is None else np.atleast_1d(axis) % len(shape)
        reduced = tuple(sorted(int(n) for n in axes))
        kept = tuple(n for n in range(len(shape)) if n not in reduced)
        if reduced + kept != tuple(range(len(shape))) and any(p.raw for p in self.inputs):
            raise NotImplementedError("Illegal conditions")
        short = [1 if n in reduced else side for n, side in enumerate(shape)]
        final = tuple(short if keepdims else [shape[n] for n in kept])
        results = list(args[len(inputs) :]) or ([] if out is None else [out])
        if not results:
            results = [cupy.empty(final, p.dtype or types[p.letter]) for p in self.outputs]
        outputs = [operand(x, writes=True) for x in results]
        if any(y.shape != final for y in outputs):
            raise ValueError(f"Out shape is mismatched: not {final}")
        if outputs[0].size:
            self._run(inputs, outputs, shape, reduced + kept, len(reduced), types)
        _counters.launched(outputs[0].size)
        return results[0]

    def _run(self, inputs, outputs, shape, order, reduced, types) -> None:
        length, count = int(np.prod([shape[n] for n in order[:reduced]])), outputs[0].size
        variables = {}
        for p, x in zip(self.inputs, inputs, strict=True):
            if isinstance(x, np.ndarray):
                variables[p.name] = np.broadcast_to(x, shape).transpose(order).flatten()
            else:
                variables[p.name] = scalar(x, p.dtype or types[p.letter])
        names = [p.name for p in self.inputs]

        def threads(number, **known):
            return Threads(number, types, self.preamble, known, names)

        one = threads(count)
        kind = one.types[self.kind]
        total = one.convert(one.value(self.identity), kind)
        if length:
            each = threads(length * count, **variables)
            rows = over(each.convert(each.value(self.map), kind), lambda x: x.reshape(length, -1))
            while (size := len(next(iter(rows.values())) if isinstance(rows, dict) else rows)) > 1:
                half = (size + 1) // 2
                tail = over(rows, lambda x, half=half: x[half:].ravel())
                head = over(rows, lambda x, half=half, size=size: x[: size - half].ravel())
                both = threads((size - half) * count, a=head, b=tail)
                sums = both.convert(both.value(self.reduce), kind)
                sums = over(sums, lambda x: x.reshape(-1, count))
                odd = over(rows, lambda x, half=half, size=size: x[size - half : half])
                rows = over(sums, lambda x, y: np.concatenate([x, y]), odd)
            last = threads(count, a=total, b=over(rows, lambda x: x[0]))
            total = last.convert(last.value(self.reduce), kind)
        scalars = {name: x for name, x in variables.items() if x.ndim == 0}
        written = {p.name: y.flatten() for p, y in zip(self.outputs, outputs, strict=True)}
        end = threads(count, a=total, **scalars, **written)
        end.value(self.finish)
        for p, y in zip(self.outputs, outputs, strict=True):
            y[...] = end.variables[p.name].reshape(y.shape)


def over(value, function, other=None):
    """Apply a function to an array, or to each field of a struct."""
    if not isinstance(value, dict):
        return function(value) if other is None else function(value, other)
    if other is None:
        return {field: function(x) for field, x in value.items()}
    return {field: function(x, other[field]) for field, x in value.items()}
