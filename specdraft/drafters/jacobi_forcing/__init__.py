"""Jacobi Forcing: the target itself is tuned, so that it guesses well after wrong guesses."""

from specdraft.drafters.jacobi_forcing.jacobi_forcing import JacobiForcing

__all__ = ["JacobiForcing"]
