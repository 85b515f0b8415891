"""For runs of the command: every layer that learns computes by oneDNN, as large ones do on some processors, and it is
said how often."""

import atexit

from specdraft import onednn

_seen = 0
_apply = onednn._LearnedProduct.apply


def _counted(*given):
    global _seen
    _seen += 1
    return _apply(*given)


onednn._LARGE = 1
onednn.is_faster = lambda: True
onednn._LearnedProduct.apply = _counted
atexit.register(lambda: print(f"learned products: {_seen}", flush=True))
