"""Drafters, one file each: parameters, training forward, drafting step."""
