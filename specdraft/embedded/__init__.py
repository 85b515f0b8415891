"""The embedded target: the weights in ``tiny/`` and the recipe that rebuilds them from the standard library."""
