"""What an engine has to say for itself: its name, what it serves and what not, and how it is started.

One subclass per engine, in a file of its own; ``conf/engine/*.yaml`` mirrors the constructors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from specdraft.errors import UserError
from specdraft.export.layout import DTYPES, TITLES, Layout
from specdraft.rendering import render

GREEDY, SAMPLED = "greedy", "sampled"
"""How tokens are drafted above temperature 0: the draft's most likely ones, or samples of its distribution."""


class Engine:
    """A serving engine. ``dtype`` is that of the exported weights; "auto" takes the dtype of the target in training.
    families: the families it serves, and the engine's own name for each. ignored: options of a drafter that it reads no
    word of. quantized: families of which it reads quantized weights. drafting: how it drafts above temperature 0 unless
    it is told otherwise. truncates_drafts: whether those that it samples leave out what top-k and top-p do; else they
    are drawn with the temperature alone."""

    name: str
    families: ClassVar[Mapping[str, str]]
    ignored: ClassVar[frozenset[str]] = frozenset()
    quantized: ClassVar[frozenset[str]] = frozenset()
    drafting: ClassVar[str] = GREEDY
    truncates_drafts: ClassVar[bool] = True

    def __init__(self, dtype: str = "auto") -> None:
        if dtype != "auto" and dtype not in DTYPES:
            raise UserError(f"engine.dtype is {dtype!r}: expected auto, {', '.join(DTYPES)}; choose one of them")
        self.dtype = dtype

    def accept(self, layout: Layout, target: Mapping[str, Any], directory: Path) -> Layout:
        """The layout as this engine reads it. ``target``: what the checkpoint says of the target's model.
        Raises UserError for a family, a target, an option or a quantization that the engine does not serve, or would
        not notice."""
        self.check_family(layout.family)
        if layout.quantization and layout.family not in self.quantized:
            wrong = f"{self.name} is not known to serve a quantized {layout.title}"
            raise UserError(f"{wrong}: expected a drafter without quantization; choose engine=vllm")
        if ignored := [option for option in layout.options if option in self.ignored]:
            wrong = f"the {layout.title} was trained with {', '.join(ignored)}, which {self.name} ignores"
            raise UserError(f"{wrong}: expected none of {', '.join(sorted(self.ignored))}; choose another engine")
        return layout

    def check_family(self, family: str) -> None:
        """Raises UserError for one that the engine does not serve."""
        if family not in self.families:
            served = ", ".join(TITLES[each] for each in self.families)
            raise UserError(f"{self.name} serves no {TITLES[family]}: expected one of {served}; choose another engine")

    def usage(
        self,
        layout: Layout,
        target: str,
        directory: str,
        num_draft_tokens: int,
        template_options: Mapping[str, Any] | None = None,
        tree: Mapping[str, Any] | None = None,
    ) -> str:
        """Markdown for the model card: how this engine is started with the drafter in ``directory``, to render
        conversations with ``template_options``. tree: the options of a ``DynamicTree`` that pays more than chains."""
        values = {"target": target, "directory": directory, "num_draft_tokens": num_draft_tokens}
        values |= {"template_options": template_options, "tree": tree}
        return render(f"export/templates/{self.name}.md.jinja", engine=self, layout=layout, **values)
