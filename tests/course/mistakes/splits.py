"""Wrong layers of split matrices, heads, vocabularies and sequences."""

PAIRS = "collective_functions.py"
COLUMNS, ROWS = "tensor_parallel/column_parallel.py", "tensor_parallel/row_parallel.py"
HEADS, WORDS = "tensor_parallel/parallel_attention.py", "tensor_parallel/vocab_parallel.py"
SEQUENCE = "tensor_parallel/sequence_parallel.py"

NEEDS = {
    "5.3": ("5.1", "5.2"),
    "5.4": ("5.1", "5.2", "5.3"),
    "5.5": ("5.1", "5.2", "5.3", "5.4"),
    "5.6": ("5.1",),
    "5.7": ("5.1", "5.2", "5.3", "5.4", "5.5", "5.6"),
}

G = 'return self.group.all_reduce(y, label="g")\n\n    def backward(self, grad):\n        return '
GATHER = (
    "return checked(whole, x, self.group, self.axis)\n\n    def backward(self, grad):\n        "
)

MISTAKES = [
    ("5.1", PAIRS, G + "grad", G + 'self.group.all_reduce(grad, label="g")', "counts it N times"),
    ("5.1", PAIRS, 'self.group.all_reduce(grad, label="f")', "grad", "0 bytes are sent backward"),
    ("5.1", PAIRS, '(grad, label="f")', '(grad, label="f") / self.group.size', "average in place"),
    (
        "5.1",
        PAIRS,
        'return self.group.all_reduce(grad, label="f")',
        'self.group.all_reduce(grad, label="f")',
        "rank 0 has no dX: is a `return` missing?",
    ),
    (
        "5.1",
        PAIRS,
        '(grad, label="f")',
        '(grad, label="f", out=grad)',
        "dY on rank 0 was written into",
    ),
    ("5.1", PAIRS, '(y, label="g")', '(y, label="g", out=y)', "X on rank 0 was written into"),
    ("5.1", PAIRS, '(grad, label="f")', '(grad.astype("f4"), label="f")', "(it is float32)"),
    (
        "5.1",
        PAIRS,
        'self.group.all_reduce(grad, label="f")',
        'self.group.all_gather(grad[None], label="f").sum(axis=0)',
        "N(N - 1) S, as of an all_gather: 2(N - 1) S will do",
    ),
    (
        "5.2",
        PAIRS,
        GATHER + "return own_part(grad",
        GATHER + "return reduce_scatter_along(grad",
        "a part of one is all that is due",
    ),
    (
        "5.2",
        PAIRS,
        GATHER + "return reduce_scatter_along(grad",
        GATHER + "return own_part(grad",
        "0 bytes are sent backward",
    ),
    (
        "5.2",
        PAIRS,
        "rows = group.reduce_scatter(xp.ascontiguousarray(xp.moveaxis(x, axis, 0)))",
        "rows = own_part(group.all_reduce(xp.moveaxis(x, axis, 0)), group, 0)",
        "an all_reduce, of which each rank needs only a part",
    ),
    (
        "5.2",
        PAIRS,
        "ends = split_ends(x.shape[axis], group.size)\n    cut = [",
        "ends = [r * x.shape[axis] // group.size for r in range(group.size + 1)]\n    cut = [",
        "has the shape",
    ),
    ("5.2", PAIRS, "grad, self.group, self.joined, self.cut", "grad, self.group, 0, 1", ""),
    ("5.3", COLUMNS, "copy_to(x, self.group)", "x", "f adds it up"),
    (
        "5.3",
        COLUMNS,
        "np.arange(group.rank * each, (group.rank + 1) * each)",
        "np.arange(group.rank, full, group.size)",
        "part of linear.weight on rank 0",
    ),
    ("5.3", COLUMNS, "if full % group.size:", "if False:", "a ValueError is due"),
    (
        "5.3",
        COLUMNS,
        "        y = ACTIVATIONS[self.activation](y)\n        return gather(y, self.group)",
        "        return gather(y, self.group)",
        "Y on rank 0",
    ),
    (
        "5.4",
        ROWS,
        "reduce_from(functions.linear(x, self.weight), self.group)\n"
        "        return ACTIVATIONS[self.activation](y if self.bias is None else y + self.bias)",
        "reduce_from(functions.linear(x, self.weight, self.bias), self.group)\n"
        "        return ACTIVATIONS[self.activation](y)",
        "times, not once: add it after g",
    ),
    (
        "5.4",
        ROWS,
        "reduce_from(functions.linear(x, self.weight), self.group)",
        "reduce_from(ACTIVATIONS[self.activation](functions.linear(x, self.weight)), self.group)",
        "Y on rank 0",
    ),
    ("5.4", ROWS, "scatter(x, self.group) if self.scatter_input else x", "x", ""),
    (
        "5.5",
        HEADS,
        "reshape(3, attention.heads, -1)[:, heads]",
        "reshape(attention.heads, -1)[heads]",
        "an equal run, which is not its heads",
    ),
    (
        "5.5",
        HEADS,
        "qkv.transpose(2, 0, 3, 1, 4)",
        "qkv.transpose(2, 0, 3, 1, 4)[[1, 0, 2]]",
        "Y on rank 0",
    ),
    ("5.5", HEADS, "self.heads = len(own)", "self.heads = attention.heads", ""),
    ("5.6", WORDS, "rows * mask", "rows", "Y on rank 0"),
    ("5.6", WORDS, "copy_to(x, group)", "x", "0 bytes are sent backward"),
    (
        "5.6",
        WORDS,
        'highest = group.all_reduce(highest, op="max", label="maximum")',
        "highest = highest * 0.0",
        "Y on rank 0 is nan, not ",
    ),
    (
        "5.6",
        WORDS,
        "real = max(0, min(each, self.vocab - first))",
        "real = each",
        "Y on rank",
    ),
    ("5.6", WORDS, "dlogits[self.picked] -= 1", "dlogits[:, 0] -= 1", "dX on rank"),
    (
        "5.6",
        WORDS,
        'sums = group.all_reduce(p.sum(axis=1), label="sum of exponentials")',
        'sums = group.all_gather(p, 1, label="sum of exponentials").sum(axis=1)',
        "bytes are sent forward",
    ),
    (
        "5.7",
        SEQUENCE,
        "sum_gradients([p for p in model.parameters() if p.shard is None], group)",
        "pass",
        "the gradients of what every rank holds have not been summed",
    ),
    (
        "5.7",
        SEQUENCE,
        (
            'whole = self.group.all_gather(x, SEQUENCE, label="sequence")',
            'whole = self.group.all_gather(self.x, SEQUENCE, label="sequence, once more")',
        ),
        (
            'whole = self.whole = self.group.all_gather(x, SEQUENCE, label="sequence")',
            "whole = self.whole",
        ),
        "all of X was kept; only the rank's own part is to be",
    ),
    (
        "5.7",
        SEQUENCE,
        "window, whole = (own, slice(0, C))",
        "window, whole = (slice(each), slice(0, C))",
        "SequenceDropout, 2 ranks, ",
    ),
    (
        "5.7",
        SEQUENCE,
        "y = reduce_scatter(functions.linear(x, self.weight), self.group, SEQUENCE)\n"
        "        return ACTIVATIONS[self.activation](y if self.bias is None else y + self.bias)",
        "y = functions.linear(x, self.weight, self.bias)\n"
        "        return ACTIVATIONS[self.activation](reduce_scatter(y, self.group, SEQUENCE))",
        "Y on rank 0 has the bias in it 2 times, not once: add it after the sum",
    ),
    ("5.6", WORDS, "+ group.rank * each, label=", ", label=", "argmax on rank"),
    (
        "5.7",
        SEQUENCE,
        "if T % group.size:",
        "if False:",
        "they do not split evenly: a ValueError is due",
    ),
    (
        "5.7",
        SEQUENCE,
        "dx = reduce_scatter_along(dx, self.group, SEQUENCE)",
        "dx = dx[:, own_positions(dx.shape[1], self.group)]",
        "dX on rank",
    ),
]

OTHERS = [
    ("5.1", PAIRS, '(grad, label="f")', '(grad, algorithm="ring")'),
    ("5.2", PAIRS, "x[tuple(cut)].copy()", "x[tuple(cut)] + 0"),
    (
        "5.3",
        COLUMNS,
        "np.arange(group.rank * each, (group.rank + 1) * each)",
        "group.rank * each + np.arange(each)",
    ),
    (
        "5.7",
        SEQUENCE,
        "dw = Product(rows, whole) if self.transposed else Product(whole, rows)",
        "dw = rows.T @ whole if self.transposed else whole.T @ rows",
    ),
]
