"""Threads of torch that wait soon give their core away, unless the user has said how they are to wait.

OpenMP's threads spin while they wait: one other busy process then makes a decoding pass 100 times slower, a training
step 10 times. Not to spin at all makes a training on an idle machine a third slower, as waking a thread takes longer
than a small product; so they spin for some microseconds (docs/benchmarks.md). Both is read when torch is loaded, so the
package sets it first of all."""

import os

CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
OURS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}  # GNU's OpenMP reads both, the others the first

if not any(name in os.environ for name in CHOICES):
    os.environ.update(OURS)
