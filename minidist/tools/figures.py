"""The pictures of the lessons: one visual language, and where a picture goes.

    plt = figures.pyplot()
    figure, axes = plt.subplots()
    axes.plot(x, y, color=figures.FORWARD)
    figures.save(figure, "00_single_device")        # python lessons/... --figures DIR

Colours are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

import argparse
import builtins
import sys
import tempfile
from pathlib import Path

FORWARD, BACKWARD, UPDATE, COMMUNICATION = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
EMPHASIS, INK, IDLE = "#D55E00", "#222222", "#BBBBBB"

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
    """Return matplotlib.pyplot in the lessons' style.

    A script needs no window, so it gets the Agg backend; a notebook, or a program that has chosen
    already, keeps its own.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("the figures need matplotlib: pip install 'minidist[lessons]'") from error
    if not hasattr(builtins, "get_ipython") and "matplotlib.pyplot" not in sys.modules:
        matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(STYLE)
    return plt


def save(figure, name: str) -> Path:
    """Save `name`.png under `--figures DIR`, else in a fresh temporary folder; return its path.

    The path is printed, too. Other arguments are left alone: in a notebook they are the kernel's
    own.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--figures", type=Path)
    folder = parser.parse_known_args()[0].figures or Path(tempfile.mkdtemp(prefix="minidist-"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, metadata={"Software": None})  # no version, no date: same data, same bytes
    print(f"figure: {path}")
    return path
