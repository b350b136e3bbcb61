"""What a strategy will cost before it runs: `simulate` replays programs on virtual clocks."""

from minidist.planning.simulator import Simulation, simulate

__all__ = ["Simulation", "simulate"]
