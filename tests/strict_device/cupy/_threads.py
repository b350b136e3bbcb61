"""Run parsed C on NumPy arrays, all threads of a kernel at once. Not a part of CuPy.

A value is an array with one element per thread (or one for all), or a struct: a dictionary of them.
An `if` or a loop runs under a mask of the threads that take it, as on a GPU. Numbers are converted
as C does: int, then float, then double. What a kernel should not do is an error: to mix float and
double (a GPU would compute in double, slowly), to read outside an array, to write to an input, to
lose digits in braces.
"""

import math

import numpy as np

from ._c import parsed

TYPES = {
    "bool": np.bool_,
    "int": np.int32,
    "long long": np.int64,
    "unsigned int": np.uint32,
    "unsigned long long": np.uint64,
    "ptrdiff_t": np.int64,
    "float16": np.float16,
    "float": np.float32,
    "double": np.float64,
}
RANKS = [np.dtype(t) for t in (np.int32, np.uint32, np.int64, np.uint64, np.float32, np.float64)]
COMPARISONS = {
    "==": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}
OPERATIONS = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "|": np.bitwise_or,
    "^": np.bitwise_xor,
    "&": np.bitwise_and,
    "<<": np.left_shift,
    ">>": np.right_shift,
}
FUNCTIONS = {
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "erf": lambda x: np.frompyfunc(math.erf, 1, 1)(x).astype(x.dtype),
}


class Raw:
    """An array that the text indexes; the kernel sees its elements in row-major order."""

    def __init__(self, name: str, flat: np.ndarray):
        self.name, self.flat = name, flat

    def read(self, at, mask) -> np.ndarray:
        at = np.broadcast_to(at, np.broadcast_shapes(at.shape, mask.shape))
        wrong = mask & ((at < 0) | (at >= self.flat.size))
        if wrong.any():
            raise IndexError(f"{self.name}[{at[wrong][0]}] of {self.flat.size} elements")
        result = np.zeros(at.shape, self.flat.dtype)
        active = np.broadcast_to(mask, at.shape)
        result[active] = self.flat[at[active]]
        return result


def wider(x: np.ndarray) -> np.ndarray:
    """Return x as arithmetic takes it: nothing is narrower than an int, and half is a float."""
    if x.dtype == np.float16:
        return x.astype(np.float32)
    return x if x.dtype in RANKS else x.astype(np.int32)


def together(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Convert two operands to their common type, C's usual arithmetic conversions."""
    x, y = wider(x), wider(y)
    if {x.dtype, y.dtype} == {RANKS[4], RANKS[5]}:
        raise TypeError("float and double in one operation: a GPU would compute in double")
    common = max(x.dtype, y.dtype, key=RANKS.index)
    return x.astype(common), y.astype(common)


def operate(symbol: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x, y = together(x, y)
    if symbol in COMPARISONS:
        return COMPARISONS[symbol](x, y)
    if symbol in OPERATIONS:
        return OPERATIONS[symbol](x, y)
    if x.dtype.kind == "f" and symbol == "/":
        return x / y
    quotient = np.where(y == 0, 0, np.floor_divide(x, np.where(y == 0, 1, y))).astype(x.dtype)
    short = (x < 0) != (y < 0) if x.dtype.kind == "i" else np.False_
    quotient = (quotient + (short & (quotient * y != x))).astype(x.dtype)  # C rounds to zero
    return quotient if symbol == "/" else x - quotient * y


class Threads:
    """The threads of one kernel. `variables` are by name; `constant` those that it may not write.

    types  {"T": dtype}: the letters of the parameters
    """

    def __init__(self, count: int, types: dict, preamble: str, variables: dict, constant=()):
        self.count, self.mask = count, np.ones(count, bool)
        self.types = {name: np.dtype(kind) for name, kind in (TYPES | types).items()}
        self.functions, self.variables, self.constant = {}, dict(variables), set(constant)
        for kind, name, *rest in self._parse(preamble, "definitions"):
            if kind == "struct":
                self.types[name] = {field: self.types[t] for t, field in rest[0]}
            else:
                self.functions[name] = rest

    def _parse(self, text: str, what: str):
        return parsed(text, frozenset(self.types), what)[0]

    def run(self, text: str) -> None:
        with np.errstate(all="ignore"):
            self.do(self._parse(text, "statements"))

    def value(self, text: str):
        with np.errstate(all="ignore"):
            return self.do(self._parse(text, "expression"))

    def do(self, node: tuple):
        return getattr(self, f"_{node[0]}")(*node[1:])

    def convert(self, value, kind):
        """Return a value as type `kind`, one element per thread."""
        if isinstance(kind, dict):
            return {field: self.convert(value[field], t) for field, t in kind.items()}
        return np.broadcast_to(value, self.count).astype(kind)

    def blend(self, new, old):
        """Return `new` for the threads that are active, `old` for the others."""
        if isinstance(new, dict):
            return {field: self.blend(new[field], old[field]) for field in new}
        return np.where(self.mask, new, old)

    def under(self, condition, node) -> None:
        before, self.mask = self.mask, self.mask & np.asarray(condition, bool)
        if self.mask.any():
            self.do(node)
        self.mask = before

    # statements

    def _block(self, nodes):
        for node in nodes:
            self.do(node)

    def _declare(self, names):
        for kind, name, value in names:
            dtype = self.types[kind]
            if value is not None:
                self.variables[name] = self.convert(self.do(value), dtype)
            else:  # not initialised
                unset = np.nan if np.dtype(dtype).kind == "f" else 77
                self.variables[name] = np.full(self.count, unset, dtype)
            self.constant.discard(name)

    def _if(self, condition, then, other):
        chosen = np.asarray(self.do(condition), bool)
        self.under(chosen, then)
        self.under(~chosen, other)

    def _while(self, condition, body, step):
        before = self.mask
        while True:
            self.mask = self.mask & np.asarray(self.do(condition), bool)
            if not self.mask.any():
                break
            self.do(body)
            self.do(step)
        self.mask = before

    # expressions

    def _number(self, word):
        if word.rstrip("UL") != word:
            return np.uint64(int(word.rstrip("UL"), 0)).reshape(())
        if not word.startswith("0x") and not word.isdigit():
            return np.asarray(float(word))
        value = int(word, 0)
        return np.asarray(value, np.int32 if value < 2**31 else np.int64)

    def _name(self, name):
        if name not in self.variables:
            raise NameError(f"C: {name} is not declared")
        return self.variables[name]

    def _comma(self, left, right):
        self.do(left)
        return self.do(right)

    def _assign(self, target, value):
        what, name, *_ = target
        value = self.do(value)
        if what != "name":
            raise TypeError("C: only a variable is assigned to here, no element and no field")
        if name in self.constant or isinstance(self._name(name), Raw):
            raise TypeError(f"C: {name} is an input, which is const")
        old = self.variables[name]
        kind = {f: x.dtype for f, x in old.items()} if isinstance(old, dict) else old.dtype
        self.variables[name] = self.blend(self.convert(value, kind), old)
        return self.variables[name]

    def _increment(self, target):
        old = self.do(target)
        self._assign(target, ("binary", "+", target, ("number", "1")))
        return old

    def _choose(self, condition, then, other):
        chosen, before = np.asarray(self.do(condition), bool), self.mask
        self.mask = before & chosen
        first = self.do(then)
        self.mask = before & ~chosen
        second = self.do(other)
        self.mask = before
        return np.where(chosen, *together(first, second))

    def _binary(self, symbol, left, right):
        if symbol not in ("&&", "||"):
            return operate(symbol, self.do(left), self.do(right))
        first, before = np.asarray(self.do(left), bool), self.mask
        self.mask = before & (first if symbol == "&&" else ~first)
        second = np.asarray(self.do(right), bool)
        self.mask = before
        return first & second if symbol == "&&" else first | second

    def _unary(self, symbol, value):
        value = self.do(value)
        return -wider(value) if symbol == "-" else ~np.asarray(value, bool)

    def _index(self, array, at):
        array = self.do(array)
        if not isinstance(array, Raw):
            raise TypeError("C: only an input that is raw has elements")
        return array.read(wider(self.do(at)), self.mask)

    def _field(self, value, field):
        return self.do(value)[field]

    def _cast(self, kind, value):
        kind, value = self.types[kind], self.do(value)
        return self.convert(value, kind) if isinstance(kind, dict) else value.astype(kind)

    def _make(self, kind, values):
        fields, values = self.types[kind], [(node, self.do(node)) for node in values]
        for (node, value), dtype in zip(values, fields.values(), strict=True):
            constant = node[0] == "number" or (node[0] == "unary" and node[2][0] == "number")
            if not constant and wider(value).dtype != dtype:
                raise TypeError(f"C: braces would narrow {value.dtype} to {dtype}")
        pairs = zip(fields.items(), values, strict=True)
        return {field: self.convert(value, dtype) for (field, dtype), (_, value) in pairs}

    def _call(self, name, arguments):
        values = [self.do(node) for node in arguments]
        if name in FUNCTIONS:
            (x,) = values
            if x.dtype not in RANKS[4:]:
                raise TypeError(f"C: {name} of {x.dtype}; cast it to float or double")
            return FUNCTIONS[name](x)
        parameters, body = self.functions[name]
        outside = self.variables, self.constant
        self.variables, self.constant = {}, set()
        for (kind, parameter), value in zip(parameters, values, strict=True):
            self.variables[parameter] = self.convert(value, self.types[kind])
        *statements, (last, result) = body[1]
        if last != "return":
            raise SyntaxError("C: a function ends in its only return")
        self._block(statements)
        result = self.do(result)
        self.variables, self.constant = outside
        return result
