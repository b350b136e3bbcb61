"""A model as a graph of values and ops, from which GSPMD, Tofu and FlexFlow find their cuts.

graph.py          values, and ops with index descriptions
tracing.py        from a model to its graph
axes.py           reshapes and transposes, which are no ops
descriptions.py   the index description of each function of autograd
gradients.py      the ops of backward
computation.py    what each op computes, whole or in parts
"""
