"""Grouped queries: several query heads read one head of keys and values.

Ainslie et al., GQA (2023), section 2.2. Letters: H query heads, K heads of keys and values, each
read by G = H/K query heads; D head width. Query head h reads head h // G. K = H is the attention of
Vaswani et al., K = 1 multi-query attention (Shazeer 2019). Keys and values have K/H of the
parameters, of the cache and of the bytes between ranks that hold parts of the sequence.
"""

from minidist.autograd import Tensor, functions
from minidist.errors import WrongInput, check_sizes
from minidist.nn.attention import attend_to_all
from minidist.nn.linear import Linear
from minidist.nn.module import Module
from minidist.nn.rotary import rotate
from minidist.nn.rotary_frequencies import check_theta
from minidist.rng import Randomness


class GroupedQueryAttention(Module):
    """Y[B, T, C] = concat over H heads of softmax(Q K^T / sqrt D) V, times W_o; rotary positions.

    The columns of `query` are [K, G, D], those of `key_value` [2, K, D]; there are no biases.

    theta   base of the angles of rotary positions
    attend  (QKV[G + 2, B, K, T, D], randomness) -> O[B, H, T, D]: G queries, then keys and values

    >>> nn.GroupedQueryAttention(8, 4, 2, dtype="float64")(Tensor(np.ones((5, 3, 8)))).shape
    (5, 3, 8)
    """

    def __init__(
        self, width, heads, kv_heads, theta=10000.0, *, name="attention", seed=0, dtype="float32"
    ):
        check_sizes(width=width, heads=heads, kv_heads=kv_heads)
        check_theta(theta)
        if heads % kv_heads or width % (2 * heads):
            raise WrongInput(
                f"width {width} needs {heads} heads of an even width, and {heads} query heads a "
                f"number of key and value heads that divides them, not {kv_heads}"
            )
        self.heads, self.kv_heads, self.theta = heads, kv_heads, theta
        self.attend, D = attend_to_all, width // heads
        more = {"seed": seed, "dtype": dtype, "bias": False}
        self.query = Linear(width, heads * D, name=f"{name}.query", **more)
        self.key_value = Linear(width, 2 * kv_heads * D, name=f"{name}.key_value", **more)
        self.output = Linear(heads * D, width, name=f"{name}.output", **more)

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        qkv = rotate(self.heads_of(*self.project(x)), self.theta, randomness)
        mixed = self.attend(qkv, randomness).transpose(0, 2, 1, 3)  # [B, T, H, D]
        B, T, H, D = mixed.shape
        return self.output(mixed.reshape(B, T, H * D))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """X[B, T, C] -> queries [B, T, H D], keys and values [B, T, 2 K D]."""
        return self.query(x), self.key_value(x)

    def heads_of(self, q: Tensor, kv: Tensor) -> Tensor:
        """Return QKV[G + 2, B, K, T, D] of queries [B, T, H D], keys and values [B, T, 2 K D]."""
        (B, T, width), H, K = q.shape, self.heads, self.kv_heads
        q = q.reshape(B, T, K, H // K, width // H).transpose(3, 0, 2, 1, 4)
        kv = kv.reshape(B, T, 2, K, width // H).transpose(2, 0, 3, 1, 4)
        return functions.concatenate([q, kv])
