"""recurrent_drafting: the package published with ReDrafter's paper, for Llama targets. Not an engine, but the one
reader of its layout: TensorRT-LLM's converter of the same files went with its TensorRT engine backend (see
``tensorrt_llm.py``), and vLLM 0.32 and SGLang 0.5.23 have none. Written to its format, never run in it."""

from collections.abc import Mapping
from typing import ClassVar

from specdraft.export.engine import Engine


class RecurrentDrafting(Engine):
    """Its ``Drafter``. Beams are the likeliest paths at every temperature."""

    name = "recurrent_drafting"
    families: ClassVar[Mapping[str, str]] = {"redrafter": "Drafter"}
