"""Hand-written GPU kernels (Triton), each the fast twin of a plain function in `atoll.model`.

Importing a module in here imports triton; `atoll.model.gpu` decides whether they are used.
"""
