"""A sequence cut over ranks, attention included. Read `cuts.py`, `tiles.py`, `ring_attention.py`,
`gathered_attention.py`, `ulysses.py`, `usp.py`, then `transformer.py`, which makes a Transformer
use one of them, and trains it.
"""

from typing import TYPE_CHECKING

from minidist import on_first_use

if TYPE_CHECKING:
    from minidist.context_parallel.cuts import Cut, plain, zigzag
    from minidist.context_parallel.transformer import (
        ContextParallel,
        columns,
        context_parallel,
        share_of_positions,
    )
    from minidist.context_parallel.usp import axes_of

__all__ = [
    "ContextParallel",
    "Cut",
    "axes_of",
    "columns",
    "context_parallel",
    "plain",
    "share_of_positions",
    "zigzag",
]

# Each name is imported when it is first used: cuts need no NumPy, a Transformer does.
_MODULE_OF = {
    "ContextParallel": "transformer",
    "Cut": "cuts",
    "axes_of": "usp",
    "columns": "transformer",
    "context_parallel": "transformer",
    "plain": "cuts",
    "share_of_positions": "transformer",
    "zigzag": "cuts",
}

__getattr__, __dir__ = on_first_use(__name__, _MODULE_OF)
