"""Wrong meshes, sums, norms and states."""

MESH, HYBRID, OPTIM = "comm/mesh.py", "hybrid.py", "optim.py"
STAGE, PIPELINE = "pipeline_parallel/stage.py", "pipeline_parallel/pipeline.py"
HOLDERS = "pipeline_parallel/holders.py"
SHARD, COLUMNS = "nn/shard.py", "tensor_parallel/whole.py"

NEEDS = {"6.2": ("6.1",), "6.5": ("6.1", "6.2", "6.3", "6.4")}

MISTAKES = [
    (
        "6.1",
        MESH,
        "in reversed(self.axes.items())",
        "in self.axes.items()",
        "last axis is the fast",
    ),
    (
        "6.1",
        MESH,
        "coordinates.get(name, self.coordinates[name])",
        "coordinates.get(name, 0)",
        "of which one axis is named",
    ),
    ("6.1", MESH, "if not 0 <= c < size:", "if not c < size:", "=-1: a ValueError is due"),
    (
        "6.1",
        MESH,
        "return {name: coordinates[name] for name in self.axes}",
        "return coordinates",
        "order of the axes",
    ),
    ("6.2", MESH, "color * axes[other] + self", "color + self", "the ranks of"),
    (
        "6.2",
        MESH,
        "key=self.coordinates[name])",
        "key=-self.coordinates[name])",
        "in another order",
    ),
    ("6.2", MESH, "or math.prod(axes.values()) != group.size", "", "a ValueError is due"),
    ("6.2", MESH, "if n != name]", "]", "the ranks of"),
    (
        "6.3",
        PIPELINE,
        "                p.grad = None\n        return taken",
        "        return taken",
        "may have been summed again by the second",
    ),
    (
        "6.3",
        PIPELINE,
        "            sum_gradients([p], self.shared[name])\n",
        "",
        "0 bytes are sent for the tied",
    ),
    (
        "6.3",
        PIPELINE,
        "p.grad if earlier is None else earlier + p.grad",
        "p.grad",
        "embedding.token.weight",
    ),
    ("6.3", STAGE, "found[name].append(stage)", "found[name] = [stage]", "is held by the stages"),
    (
        "6.4",
        HYBRID,
        'self.mesh.dp.all_reduce(layer.flat.gradient, out=layer.flat.gradient, label="dp")',
        "pass",
        "has not been summed over any rank",
    ),
    (
        "6.4",
        HYBRID,
        "p.grad = p.grad_buffer",
        "p.grad = p.grad_buffer / self.mesh.dp.size",
        "an average over dp",
    ),
    (
        "6.4",
        HYBRID,
        "if self.split_sequence:\n            all_reduce",
        "if True:\n            all_reduce",
        "tp adds it up",
    ),
    (
        "6.4",
        HYBRID,
        "if self.split_sequence:\n            all_reduce",
        "if False:\n            all_reduce",
        "0 bytes are sent on tp",
    ),
    (
        "6.5",
        HYBRID,
        "examples[mine], targets.size",
        "examples[mine], targets[mine].size",
        "total of 0 on rank",
    ),
    ("6.5", HYBRID, "examples[mine], targets.size", "None, targets.size", "examples of"),
    (
        "6.5",
        HYBRID,
        "self.mesh.dp.all_reduce(self.mesh.pp.all_reduce(np.array(loss)))",
        "self.mesh.dp.all_reduce(np.array(loss))",
        "loss on rank 0",
    ),
    (
        "6.5",
        HYBRID,
        "if any(p.grad is not None for p in self.parameters()):",
        "if False:",
        "a ValueError",
    ),
    (
        "6.6",
        HYBRID,
        "counted_here(self.pipeline.counted_here(), self.mesh.tp)",
        "self.pipeline.counted_here()",
        "of tp has alike counts on each",
    ),
    (
        "6.6",
        HYBRID,
        "self.pipeline.counted_here()",
        "self.parameters()",
        "a tied parameter counts once per stage",
    ),
    (
        "6.6",
        HYBRID,
        "own, self.mesh.tp, self.mesh.pp)",
        "own, self.mesh.tp, self.mesh.pp, self.mesh.dp)",
        "replicas on dp are added up",
    ),
    ("6.6", OPTIM, "if norm > max_norm:", "if True:", "are not made longer"),
    (
        "6.6",
        OPTIM,
        "if sum_squares is None and spread:",
        "if False and spread:",
        "are to be a ValueError",
    ),
    (
        "6.7",
        SHARD,
        'np.argsort(indices, kind="stable")[: self.full]',
        "np.arange(self.full)",
        "in other places",
    ),
    ("6.7", SHARD, "[: self.full]", "", "has the shape"),
    ("6.7", HOLDERS, "    return result", "    return mine", "is missing"),
    ("6.7", HOLDERS, "int(ranks.argmax())", "0", ""),
]

OTHERS = [
    (
        "6.2",
        MESH,
        "color = color * axes[other] + self.coordinates[other]",
        "color = 10 * color + self.coordinates[other]",
    ),
    (
        "6.4",
        HYBRID,
        (
            'self.mesh.dp.all_reduce(layer.flat.gradient, out=layer.flat.gradient, label="dp")',
            "p.grad = p.grad_buffer",
        ),
        ("pass", "p.grad = self.mesh.dp.all_reduce(p.grad_buffer)"),
    ),
    ("6.6", HYBRID, "self.mesh.tp.rank > 0", "self.mesh.tp.rank < self.mesh.tp.size - 1"),
    ("6.7", HOLDERS, "int(ranks.argmax())", "int(np.flatnonzero(ranks)[-1])"),
]
