"""What CuPy does with a table of expressions: the same on a GPU and on the stand-in.

    h, hi, hm    arrays of the host: float32[2, 3], two indices, a mask[2, 3]
    x, i, m      the same on the device
    half, wide   x as float16 and as float64
    n, b         integers int32[3] and truths bool[3]

Where the two disagree, the stand-in is wrong.
"""

import pickle

import numpy as np
import pytest

from minidist.backend import device_module, to_device, to_host

pytestmark = pytest.mark.gpu

H = np.arange(6, dtype="float32").reshape(2, 3)
REFUSED = [  # expression, error
    # Nothing of the host goes to the device unasked, nor back.
    ("x + h", TypeError),
    ("x * np.array(2.0)", TypeError),
    ("h += x", TypeError),
    ("np.asarray(x)", TypeError),
    ("cp.maximum(x, h)", TypeError),
    ("cp.where(m, x, h)", TypeError),
    ("cp.concatenate([x, h])", TypeError),
    ("x @ h.T", TypeError),
    ("x[...] = h", ValueError),
    ("x[0] = [1, 2, 3]", (TypeError, ValueError)),  # CuPy 13, CuPy 14
    ("x.fill(h)", ValueError),
    ("x.set(wide.get())", TypeError),
    # Keywords that only NumPy has.
    ("x.max(initial=0)", TypeError),
    ("cp.add(x, x, where=m)", TypeError),
    ("x.astype('float16', casting='safe')", TypeError),
    # Arrays that are no numbers.
    ("bool(x)", ValueError),
    ("range(cp.array(3))", TypeError),
    ("hash(x)", TypeError),
    # Shapes and dtypes.
    ("x[2]", IndexError),
    ("x[wide]", IndexError),
    ("x @ x", ValueError),
    ("cp.add(x, x, out=x[0])", ValueError),
    ("n += 1.5", TypeError),
    ("-b", TypeError),
    ("cp.concatenate([])", ValueError),
]
GIVEN = [  # expression, what it gives: a device array if the right side is an array of NumPy
    # A reduction or an element is an array of no dimension, on the device.
    ("x.sum()", np.array(15, "float32")),
    ("x[1, 2]", np.array(5, "float32")),
    ("float(x.sum())", 15.0),
    # NumPy's functions and scalars find CuPy's.
    ("np.exp(x * 0)", np.ones((2, 3), "float32")),
    ("np.float32(2) * x", 2 * H),
    ("x == None", np.zeros((2, 3), "bool")),
    ("x[0] == np.array(1.0)", np.array([False, True, False])),
    # Dtypes: Python's numbers are weak, a quotient of integers has 64 bits.
    ("half * 2.0", (2 * H).astype("float16")),
    ("n * 1.5", np.array([0, 1.5, 3.0])),
    ("n / 2", np.array([0, 0.5, 1.0])),
    ("n ** 0.5", np.sqrt(np.arange(3))),
    ("b.sum()", np.array(2)),
    ("(x + wide).dtype == 'float64'", True),
    # Half precision is added up in single precision.
    ("cp.ones(4096, 'float16').sum()", np.array(4096, "float16")),
    ("(cp.ones((2, 4096), 'f2') @ cp.ones((4096, 2), 'f2'))[0]", np.full(2, 4096, "float16")),
    # Indices: of the host too, and arrays of them wrap around.
    ("x[hi]", H[[1, 0]]),
    ("x[i + 2]", H[[1, 0]]),
    ("cp.take(x, hi, axis=1)", H[:, [1, 0]]),
    ("cp.take_along_axis(x, i[:, None], 1)", H[[0, 1], [1, 0]][:, None]),
    ("x[m]", H[H > 2]),
    ("x[m] = 0.0; x", np.where(H > 2, 0, H)),
    ("x[i] = h; x", H[[1, 0]]),
    ("cp.add.at(x, (cp.array([0, 0]), cp.array([0, 0])), 1.0); x[0, :1]", np.full(1, 2, "float32")),
    # Assignments cast without a word.
    ("x[...] = half; x", H),
    ("cp.add(wide, 1, out=x); x", H + 1),
    # Nothing warns.
    ("x / 0 == cp.inf", H > 0),
    ("(x * 1e38).astype('float16')[1]", np.full(3, np.inf, "float16")),
    # Layouts.
    ("(x.T + x.T).flags.c_contiguous", True),
    ("x.T.astype('float64').flags.f_contiguous", True),
    ("cp.ascontiguousarray(x[0, 0]).shape", (1,)),
    ("cp.zeros_like(x.T).flags.f_contiguous", True),
    # Moving.
    ("cp.asnumpy(x) is h", False),
    ("cp.asarray(x) is x", True),
    ("cp.get_array_module(h, x) is cp", True),
    ("pickle.loads(pickle.dumps(x))", H),
    ("cp.array([x[0], x[1]])", H),
    ("cp.where(m, x, 0.0)", np.where(H > 2, H, np.float32(0))),
]


@pytest.fixture
def names(gpu):
    host = {"h": H.copy(), "hi": np.array([1, 0]), "hm": H > 2}
    there = {"x": host["h"], "i": host["hi"], "m": host["hm"], "wide": H.astype("float64")}
    there |= {"half": H.astype("float16"), "n": np.arange(3, dtype="int32"), "b": H[0] > 0}
    modules = {"cp": device_module("gpu"), "np": np, "pickle": pickle}
    return modules | host | {name: to_device(array, "gpu") for name, array in there.items()}


@pytest.mark.parametrize("code, error", REFUSED)
def test_it_is_refused(code, error, names):
    with pytest.raises(error):
        exec(code, names)


@pytest.mark.parametrize("code, want", GIVEN)
def test_it_gives(code, want, names):
    *before, last = code.split(";")
    exec(";".join(before), names)
    got = eval(last.strip(), names)
    if isinstance(want, np.ndarray):
        assert type(got) is names["cp"].ndarray
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        got, want = to_host(got).tolist(), want.tolist()
    assert got == want
