"""Models of other frameworks: what has to be renamed and turned before numbers can be compared.

torch.py has the map between our parameters and PyTorch's, twins.py our models in plain PyTorch.
"""
