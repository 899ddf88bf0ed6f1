"""FP8 kernels: the plain-torch version of each, which is also the oracle of the fused ones.

Everything here takes and returns plain tensors. Nothing knows of slots, groups or modules.
"""
