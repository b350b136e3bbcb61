"""The figure of `minidist train --plot`: the loss of each step, and below it the learning rate."""

from collections.abc import Sequence

from minidist.observe import style


def save(path: str, losses: Sequence[float], rates: Sequence[float], unit: str, title: str) -> None:
    """Write the figure; losses in nats per `unit`; rates of the last steps, none: not drawn."""
    plt, heights = style.pyplot(), [3, 1] if rates else [1]
    figure, axes = plt.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
    steps = range(1, len(losses) + 1)
    axes[0, 0].plot(steps, losses, color=style.FORWARD, linewidth=1)
    axes[0, 0].set(title=title, ylabel=f"loss (nats per {unit})")
    if rates:
        axes[1, 0].plot(steps[-len(rates) :], rates, color=style.EMPHASIS)
        axes[1, 0].set(ylabel="learning rate", ylim=(0, None))
    axes[-1, 0].set(xlabel="step")
    figure.savefig(path)
    plt.close(figure)
