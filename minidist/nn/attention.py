"""Causal multi-head self-attention (Vaswani et al. 2017, section 3.2)."""

from minidist.autograd import Tensor
from minidist.autograd.attention import causal_attention
from minidist.nn.linear import Linear
from minidist.nn.module import Module, check_sizes
from minidist.rng import Randomness


class CausalSelfAttention(Module):
    """Y[B, T, C] = concat over heads of softmax(Q K^T / sqrt D) V, times W_o;  C = H D.

    `qkv` makes queries, keys and values of all heads in one product: its 3C columns are [3, H, D].
    attend  (QKV[3, B, H, T, D], randomness) -> O[B, H, T, D]
    """

    def __init__(self, width: int, heads: int, *, name="attention", seed=0, dtype="float32"):
        check_sizes(width=width, heads=heads)
        if width % heads:
            raise ValueError(
                f"width {width} does not split into {heads} heads; use a multiple of {heads}"
            )
        self.heads, self.attend = heads, attend_to_all
        self.qkv = Linear(width, 3 * width, name=f"{name}.qkv", seed=seed, dtype=dtype)
        self.output = Linear(width, width, name=f"{name}.output", seed=seed, dtype=dtype)

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, self.heads, C // self.heads)
        mixed = self.attend(qkv.transpose(2, 0, 3, 1, 4), randomness)  # [B, H, T, D]
        return self.output(mixed.transpose(0, 2, 1, 3).reshape(B, T, C))


def attend_to_all(qkv: Tensor, randomness: Randomness | None = None) -> Tensor:
    """Attend on one device: QKV[3, B, H, T, D] -> O[B, H, T, D], every position of each example.

    A strategy that cuts the sequence puts its own function in the place of this one.
    """
    held = None if randomness is None else randomness.positions
    if held is not None and not held.whole:
        raise ValueError(
            f"this attention sees {len(held)} of {held.length} positions; a sequence that is cut "
            "needs ring_attention or ulysses (context_parallel/)"
        )
    return causal_attention(qkv)
