"""A C text for a GPU, as a function: CuPy compiles it at its first call and keeps it.

The text is written once for float32 and float64: `T` is the dtype of the arrays of that type.
Source: CuPy's documentation, "User-Defined Kernels".
"""

import functools
from dataclasses import dataclass

from minidist.backend import Array, array_module, device_module


@dataclass(frozen=True)
class Elementwise:
    """A C text that runs once per element of its arrays, broadcast together; one launch.

    inputs, outputs  parameters in the order of the call, "T x, raw int64 order": an array or a
                     number, `raw` if the text indexes it. Outputs that are not passed are new
    text             statements; `i` is the element's index in row-major order
    """

    name: str
    inputs: str
    outputs: str
    text: str

    @functools.cached_property
    def kernel(self):
        xp = device_module("gpu")
        return xp.ElementwiseKernel(self.inputs, self.outputs, self.text, self.name)

    def __call__(self, *arrays, **size):
        return self.kernel(*arrays, **size)


@dataclass(frozen=True)
class Reduction:
    """A C text that reduces its arrays, broadcast together, along an axis; one launch.

    inputs, outputs  as for Elementwise, but none is raw
    each      expression, of type `kind`: what one element contributes
    combine   expression: two such values, a and b, as one
    finish    expression that assigns the outputs from the total, a
    identity  expression: the value of no elements
    preamble  the definitions of `kind` and of the functions that the expressions call
    axis      -1, kept with length 1; 0; or None for all elements
    """

    name: str
    inputs: str
    outputs: str
    each: str
    combine: str
    finish: str
    identity: str = "0"
    kind: str = "T"
    preamble: str = ""
    axis: int | None = -1

    @functools.cached_property
    def kernel(self):
        xp, parameters = device_module("gpu"), (self.inputs, self.outputs)
        texts = self.each, self.combine, self.finish, self.identity, self.name, self.kind
        return xp.ReductionKernel(*parameters, *texts, preamble=self.preamble)

    def __call__(self, x: Array, *others, out: Array | None = None):
        outputs = self.outputs.count(",") + 1
        where = {"axis": self.axis, "keepdims": self.axis == -1}
        if outputs == 1:
            return self.kernel(x, *others, out=out, **where)
        results = [array_module(x).empty((*x.shape[:-1], 1), x.dtype) for _ in range(outputs)]
        self.kernel(x, *others, *results, **where)
        return results
