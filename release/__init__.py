"""How a release is made: the tested sets of packages, the distributions, the container's recipe.

RELEASING.md says when each is run. Nothing here is part of the package.
"""
