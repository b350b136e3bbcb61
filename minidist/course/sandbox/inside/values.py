"""Values as they cross the border of the sandbox: nothing in them is code.

A value is None, a truth value, a number, a text, an array of one of these, or a list or dictionary
of values. As bytes it is a line of JSON, and then the bytes of its arrays, one after the other. In
the line an array is {"array": [dtype, shape]} and a dictionary {"dict": [[key, value], ...]}.
"""

import json
import math
import sys

import numpy as np

LARGEST = 1 << 24  # bytes of an array, and of a value
HEAD = 1 << 18  # bytes of the line
KINDS = "biufU"  # of NumPy's data types


def encode(value) -> bytes:
    """Return a value as bytes; TypeError if it is none. A tuple becomes a list."""
    arrays = []

    def plain(value, name):
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, dict):
            return {"dict": [[key, plain(each, key)] for key, each in value.items()]}
        if isinstance(value, list | tuple):
            return [plain(each, name) for each in value]
        array = np.asarray(value)
        if array.dtype.kind not in KINDS:
            raise TypeError(
                f"{name} should be an array of numbers, and is of {array.dtype}: {value!r:.200}"
            )
        arrays.append(array.tobytes())
        return {"array": [array.dtype.str, array.shape]}

    line = json.dumps(plain(value, "the answer"))
    return b"".join([line.encode(), b"\n", *arrays])


def decode(content: bytes):
    """Return the value of bytes that may be anything; some error, of any kind, if they are none."""
    line, _, rest = content.partition(b"\n")
    if len(line) > HEAD:
        raise ValueError(f"more than {HEAD} bytes of names")
    data, begin = memoryview(rest), 0  # of which a part is no copy

    def value(plain):
        nonlocal begin
        if isinstance(plain, list):
            return [value(each) for each in plain]
        if not isinstance(plain, dict):
            return plain
        ((kind, inner),) = plain.items()
        if kind == "dict":
            return {key if type(key) is int else str(key): value(each) for key, each in inner}
        found = array(*plain["array"], data[begin:])
        begin += found.nbytes
        return found

    return value(json.loads(line))


def array(kind: str, shape: list[int], data: memoryview) -> np.ndarray:
    """Return the array at the beginning of `data`; ValueError if `encode` writes none such."""
    if len(kind) > 16 or len(shape) > 16:  # products of many sizes take their time
        raise ValueError("no array of numbers")
    dtype = np.dtype(kind)
    if dtype.kind not in KINDS or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError("no array of numbers")
    if math.prod(max(1, length) for length in shape) > LARGEST:  # [10**12, 0] is as many lists
        raise ValueError("an array is too large")
    size = math.prod(shape) * dtype.itemsize
    if len(data) < size:
        raise ValueError("an array is cut off")
    content = np.frombuffer(data, np.uint8, size).copy()
    if dtype.kind == "U" and (content.view(f"{dtype.str[0]}u4") > sys.maxunicode).any():
        raise ValueError("no text")  # NumPy raises SystemError when it is read
    return content.view(dtype).reshape(shape)
