"""The style and the colours of every figure: timelines, and the figures of the lessons.

The colours are from Okabe and Ito; colour-blind readers can tell them apart.
"""

import builtins
import sys

from minidist.errors import WrongInput

FORWARD, BACKWARD, UPDATE, COMMUNICATION = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
EMPHASIS, INK, IDLE = "#D55E00", "#222222", "#BBBBBB"
OWN, SAME = "#56B4E9", "#E4E4E4"  # what a rank has of its own; what all ranks have alike
ROW = "#F0F0F0"  # of a rank's row in a timeline: what stays grey is idle

STYLE = {
    "figure.figsize": (8, 4.5),
    "figure.constrained_layout.use": True,
    "savefig.dpi": 160,
    "savefig.facecolor": "white",
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "figure.titlesize": 13,
    "figure.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "text.color": INK,
    "lines.linewidth": 2,
    "legend.frameon": False,
}


def pyplot():
    """Return matplotlib.pyplot in this style.

    A script needs no window, so it gets the Agg backend; a notebook, or a program that has already
    chosen a backend, keeps it.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise WrongInput("the figures need matplotlib: pip install 'minidist[lessons]'") from error
    if not in_notebook() and "matplotlib.pyplot" not in sys.modules:
        matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(STYLE)
    return plt


def in_notebook() -> bool:
    return hasattr(builtins, "get_ipython")
