"""The rules of optimizers on a GPU, and the clipping of gradients; the NumPy texts are in optim/.

Outputs are updated in place.
"""

from minidist.autograd.kernels.launch import Elementwise, Reduction

sum_of_squares = Reduction(
    "sum_of_squares",
    "T x",
    "float64 total",
    each="double(x) * double(x)",
    combine="a + b",
    finish="total = a",
    kind="double",
    axis=None,
)
root_of_sum = Reduction("root_of_sum", "T x", "T root", "x", "a + b", "root = sqrt(a)", axis=None)
clip = Elementwise(
    "clip",
    "float64 norm, float64 max_norm",
    "T g",
    "if (norm > max_norm) g = g * T(max_norm / norm)",
)
sgd = Elementwise("sgd", "T g, T lr, T decay", "T p", "p -= lr * (g + decay * p)")
momentum = Elementwise(
    "momentum",
    "T g, T lr, T decay, T mu",
    "T p, T m",
    """
    m = mu * m + (g + decay * p);
    p -= lr * m""",
)
adagrad = Elementwise(
    "adagrad",
    "T g, T lr, T eps",
    "T p, T a",
    """
    a += g * g;
    p -= lr * (g / (sqrt(a) + eps))""",
)
adam = Elementwise(
    "adam",
    "T g, T l2, T kept, T b1, T rest1, T b2, T rest2, T scale, T eps, T rate",
    "T p, T m, T v",
    """
    T gradient = g + l2 * p;
    p *= kept;
    m = b1 * m + rest1 * gradient;
    v = b2 * v + rest2 * (gradient * gradient);
    p -= rate * (m / (sqrt(v) * scale + eps))""",
)
