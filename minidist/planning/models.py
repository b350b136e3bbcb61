"""Published sizes of models, by name, and the mesh on which each was trained.

1.7b to 1008b   Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters
                Using Megatron-LM (SC 2021), table 1: up to 3,072 GPUs, 8 of 80 GB per node
124m to 1.5b    Radford et al., Language Models are Unsupervised Multitask Learners (2019): GPT-2
175b            Brown et al., Language Models are Few-Shot Learners (2020): GPT-3
"""

from typing import NamedTuple

from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.plan import Plan


class Published(NamedTuple):
    """A size, and the ranks and the examples of a batch it was trained with (0: not published)."""

    size: TransformerSize
    tp: int = 0
    pp: int = 0
    ranks: int = 0
    batch: int = 0

    @property
    def mesh(self) -> Plan:
        """The mesh, in micro-batches of one example."""
        dp = self.ranks // (self.tp * self.pp)
        return Plan(dp, self.pp, self.tp, micro_batches=self.batch // dp)


def _gpt2(layers: int, width: int) -> Published:
    return Published(TransformerSize(layers, width, width // 64, 1024, 50257))


def _megatron(heads: int, width: int, layers: int, *mesh: int) -> Published:
    return Published(TransformerSize(layers, width, heads, 2048, 51200), *mesh)


PUBLISHED = {
    "124m": _gpt2(12, 768),
    "355m": _gpt2(24, 1024),
    "774m": _gpt2(36, 1280),
    "1.5b": _gpt2(48, 1600),
    "1.7b": _megatron(24, 2304, 24, 1, 1, 32, 512),
    "3.6b": _megatron(32, 3072, 30, 2, 1, 64, 512),
    "7.5b": _megatron(32, 4096, 36, 4, 1, 128, 512),
    "18.4b": _megatron(48, 6144, 40, 8, 1, 256, 1024),
    "39.1b": _megatron(64, 8192, 48, 8, 2, 512, 1536),
    "76.1b": _megatron(80, 10240, 60, 8, 4, 1024, 1792),
    "145.6b": _megatron(96, 12288, 80, 8, 8, 1536, 2304),
    "175b": Published(TransformerSize(96, 12288, 96, 2048, 50257)),
    "310.1b": _megatron(128, 16384, 96, 8, 16, 1920, 2160),
    "529.6b": _megatron(128, 20480, 105, 8, 35, 2520, 2520),
    "1008b": _megatron(160, 25600, 128, 8, 64, 3072, 3072),
}


def size_of(name: str) -> TransformerSize:
    """Return the size of a published model."""
    if name not in PUBLISHED:
        raise ValueError(f"no model {name!r}; choose one of {', '.join(PUBLISHED)}")
    return PUBLISHED[name].size
