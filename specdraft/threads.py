"""Threads of torch that wait give their core away, unless the user has said how they are to wait.

OpenMP's threads spin while they wait: one other busy process then makes a decoding pass 100 times slower, a training
step 10 times. The policy is read when torch is loaded, so the package sets it first of all."""

import os

CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

if not any(name in os.environ for name in CHOICES):
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
