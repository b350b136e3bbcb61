"""Wrong deals of a batch, sums, plans of buckets and gatherers."""

DATASETS, NAIVE = "datasets.py", "data_parallel/naive.py"
BUCKETS, ZERO = "data_parallel/bucketed.py", "data_parallel/zero.py"

MISTAKES = [
    (
        "3.2",
        NAIVE,
        "p.grad = group.all_reduce(grad, label=name)",
        "grad = group.all_reduce(grad, label=name)",
        "the gradient of layers.0.weight is wrong: it is rank 0's part alone",
    ),
    ("3.3", BUCKETS, "return buckets", "return [[p.name] for p in parameters]", "is no parameter"),
    (
        "3.3",
        BUCKETS,
        "    return buckets",
        "    parameters.clear()\n    return buckets",
        "the list of parameters is another one afterwards",
    ),
    (
        "3.4",
        BUCKETS,
        "range(self.launched, stop)",
        "range(self.launched, stop + 1)",
        "bucket 1 is launched, and there are [0] only",
    ),
    (
        "3.4",
        BUCKETS,
        "                p.grad = p.grad_buffer\n",
        "                pass\n",
        "rank 1, the gradient of layers.0.weight is missing",
    ),
    ("3.7", ZERO, "if 0 <= then <", "if k < 0 <= then <", "no layer is coming, not layer 1"),
]

OTHERS = [
    ("3.3", BUCKETS, "return buckets", "return tuple(map(tuple, buckets))"),
]
