"""Unison measured beside hand-written JAX and its peers, in turn, in one run.

Machines differ between hours more than programs do, so only ratios of one run count. Every
contestant is a process of its own; one works at a time, the others wait for a line on standard
input. `python -m benchmarks --help` says what there is.

This package is also imported by the peers' interpreters: outside `contestants/` it needs nothing
but Python and NumPy.
"""
