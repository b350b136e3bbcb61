"""A sequence cut over ranks, attention included. Read `cuts.py`, `ring_attention.py`, `ulysses.py`,
then `transformer.py`, which makes a Transformer use one of them.
"""

from minidist.context_parallel.cuts import Cut, columns, plain, zigzag
from minidist.context_parallel.transformer import context_parallel

__all__ = ["Cut", "columns", "context_parallel", "plain", "zigzag"]
