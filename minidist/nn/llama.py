"""Llama: the decoder-only Transformer of today.

Touvron et al., LLaMA (2023), section 2.2: norms by the root mean square, SwiGLU, rotary positions;
grouped queries as in Llama 2 (2023), section 2.2. There are no biases. All else, and what every
strategy sees, is nn.Transformer.
"""

from functools import partial

from minidist.nn.attention import GroupedQueryAttention
from minidist.nn.norms import RMSNorm
from minidist.nn.transformer import Style, Transformer


class Llama(Transformer):
    """tokens[B, T] -> logits[B, T, V], T <= context.  Layers: embedding, `depth` blocks, head.

    kv_heads  heads of keys and values, a divisor of `heads`; by default as many
    hidden    F, the width between gate and up, and down; by default 8/3 of the width, rounded up
              to a multiple of 8
    theta     base of the angles of rotary positions; or Stretched, see rotary.py
    eps       of the norms
    more      dropout, tied, experts and what belongs to them: see Transformer

    >>> model = nn.Llama(vocab=100, width=16, heads=4, kv_heads=2, depth=1, context=16)
    >>> model(np.array([[3, 1, 4]])).shape, list(model.named_parameters())[3]
    ((1, 3, 100), 'blocks.0.attention.key_value.weight')
    """

    def __init__(
        self,
        vocab,
        width,
        heads,
        kv_heads=None,
        depth=1,
        context=2048,
        seed=0,
        dtype="float32",
        hidden=None,
        theta=10000.0,
        eps=1e-5,
        **more,
    ):
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.hidden = -(-width // 3) * 8 if hidden is None else hidden
        attention = partial(GroupedQueryAttention, kv_heads=self.kv_heads, theta=theta)
        style = Style(partial(RMSNorm, eps=eps), attention, self.hidden, "swiglu", False, False)
        super().__init__(vocab, width, heads, depth, context, seed, dtype, style=style, **more)
