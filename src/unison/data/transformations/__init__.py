"""Transformations: plans over other plans, which implement `Dataset`'s methods."""
