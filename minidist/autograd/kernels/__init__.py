"""Functions with two texts: NumPy for arrays on the host, C for arrays on a GPU, in few launches.

The NumPy text is the definition. It is beside the C text, or in the Function that uses it. The C
text computes the same in another order: a GPU sums in a tree, rounds a b + c once, and in float32
takes numbers below 1e-38 for 0. Both compute in float32 or float64: half precision is widened.
Read `launch.py`, then any of the others.
"""
