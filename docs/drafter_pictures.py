"""A picture of each drafter: what it reads and what it writes."""

from collections.abc import Callable

from docs.drawing import Picture


def _target(picture: Picture, x: int, y: int, layers: tuple[str, ...]) -> None:
    """The frozen target as a stack of layers, from below."""
    for number, label in enumerate(layers):
        picture.box(x, y - 34 * number, 150, 28, label)
    picture.text(x, y + 50, "the target, frozen")


def draft_model() -> Picture:
    """Two language models, one small."""
    p = Picture(720, 240, "An independent draft model reads the text alone")
    _target(p, 40, 160, ("layer 1", "layers 2 … L-1", "layer L", "LM head"))
    p.box(420, 126, 150, 28, "few layers", "trained")
    p.box(420, 92, 150, 28, "LM head", "trained")
    p.box(420, 180, 150, 26, "tokens so far", "token")
    p.arrow((495, 178), (495, 158))
    p.arrow((495, 90), (495, 62))
    p.text(495, 52, "next token, then the next …", "middle")
    p.arrow((195, 72), (415, 104))
    p.text(305, 66, "distilled while training", "middle")
    return p


def _head(p: Picture, number: int, x: int, parts: str) -> None:
    """One of several heads on the target's last state, and the token that it drafts."""
    p.box(x, 106, 120, 44, f"head {number + 1}\n{parts}", "trained")
    p.arrow((192, 72), (230, 72), (230, 178), (x + 60, 178), (x + 60, 153))
    p.arrow((x + 60, 104), (x + 60, 74))
    p.text(x + 60, 62, f"token t+{number + 2}", "middle")


def medusa() -> Picture:
    """Independent heads on one state."""
    p = Picture(720, 240, "Medusa: independent heads on the target's last hidden state")
    _target(p, 40, 160, ("layer 1", "layers 2 … L-1", "layer L", "final norm"))
    for number in range(3):
        _head(p, number, 300 + 140 * number, "residual, LM")
    p.text(240, 212, "one hidden state, all tokens at once: no head sees what another drafted")
    return p


def hydra() -> Picture:
    """Medusa's heads, each told what was drafted."""
    p = Picture(720, 240, "Hydra: heads that see the tokens drafted before them")
    _target(p, 40, 160, ("layer 1", "layers 2 … L-1", "layer L", "final norm"))
    for number in range(3):
        x = 300 + 140 * number
        _head(p, number, x, "MLP, LM")
        if number:
            p.arrow((x - 40, 68), (x - 14, 82), (x + 10, 104))
    p.text(240, 212, "the drafted token's embedding joins the input of every later head")
    return p


def redrafter() -> Picture:
    """One state and one cell for all tokens."""
    p = Picture(720, 250, "ReDrafter: a recurrent state of the drafted tokens beside the target's last hidden state")
    _target(p, 40, 160, ("layer 1", "layers 2 … L-1", "layer L", "final norm"))
    for number, label in enumerate(("token t+1", "token t+2", "token t+3")):
        x = 300 + 140 * number
        p.box(x, 184, 110, 28, label, "token")
        p.box(x, 134, 110, 30, "cell", "trained")
        p.box(x, 76, 110, 40, "layers,\nprojection", "trained")
        p.arrow((x + 55, 182), (x + 55, 167))
        p.arrow((x + 55, 132), (x + 55, 119))
        p.arrow((192, 72), (230, 72), (230, 125), (x + 20, 125), (x + 20, 119))
        p.arrow((x + 55, 74), (x + 55, 58))
        p.text(x + 55, 48, f"token t+{number + 2}", "middle")
        if number:
            p.arrow((x - 28, 149), (x - 3, 149))
    p.text(300, 236, "one cell and one projection for all tokens, however long the draft", size=12)
    return p


def eagle1() -> Picture:
    """Extrapolation of the last hidden state."""
    p = Picture(720, 240, "EAGLE-1: one decoder layer that extrapolates the target's last hidden state")
    _target(p, 40, 160, ("layer 1", "layers 2 … L-1", "layer L", "LM head"))
    p.box(300, 150, 170, 34, "embedding of t+1", "token")
    p.box(300, 96, 170, 40, "fc + one decoder layer", "trained")
    p.box(300, 44, 170, 34, "the target's LM head")
    p.arrow((192, 106), (296, 114))
    p.text(240, 98, "hidden state t", "middle", size=11)
    p.arrow((385, 148), (385, 139))
    p.arrow((385, 94), (385, 81))
    p.arrow((472, 61), (560, 61))
    p.text(566, 66, "token t+2")
    p.arrow((472, 116), (540, 116), (540, 200), (286, 200), (286, 128), (297, 128))
    p.text(548, 150, "its own output stands")
    p.text(548, 166, "for hidden state t+1")
    return p


def eagle3() -> Picture:
    """Fusion of three layers, training-time test."""
    p = Picture(720, 250, "EAGLE-3: three hidden states fused, one decoder layer, its own outputs fed back")
    _target(p, 40, 170, ("layer 2", "layer L/2", "layer L-3", "LM head"))
    p.box(270, 102, 90, 60, "fusion\n3H → H", "trained")
    for y in (184, 150, 116):
        p.arrow((192, y), (232, y), (232, 132), (267, 132))
    p.box(400, 102, 130, 60, "one decoder\nlayer", "trained")
    p.arrow((362, 132), (397, 132))
    p.box(400, 192, 130, 30, "embedding of t+1", "token")
    p.arrow((465, 190), (465, 165))
    p.box(400, 44, 130, 34, "own LM head", "trained")
    p.text(540, 56, "draft vocabulary:", size=11)
    p.text(540, 70, "token t+2, t+3, …", size=11)
    p.arrow((465, 100), (465, 81))
    p.arrow((532, 132), (580, 132), (580, 236), (380, 236), (380, 142), (397, 142))
    p.text(588, 150, "its own output,")
    p.text(588, 166, "in training too:")
    p.text(588, 182, "training-time test")
    return p


def mtp() -> Picture:
    """A layer of the target's own, used again for every token."""
    p = Picture(720, 250, "MTP: a decoder layer that the target comes with, used again for every drafted token")
    _target(p, 40, 170, ("layers", "…", "last layer", "final norm, LM head"))
    p.box(270, 102, 110, 60, "norms\n2H → H", "trained")
    p.arrow((192, 116), (266, 124))
    p.text(204, 100, "hidden state t", size=11)
    p.box(270, 192, 130, 30, "embedding of t+1", "token")
    p.arrow((325, 190), (325, 165))
    p.box(420, 102, 120, 60, "one decoder\nlayer, norm", "trained")
    p.arrow((382, 132), (416, 132))
    p.box(420, 44, 120, 34, "target's LM head", "frozen")
    p.arrow((480, 100), (480, 81))
    p.arrow((542, 61), (590, 61))
    p.text(596, 66, "token t+2, t+3, …")
    p.arrow((542, 132), (600, 132), (600, 236), (240, 236), (240, 146), (266, 146))
    p.text(608, 160, "its own output")
    p.text(608, 176, "stands for the")
    p.text(608, 192, "next hidden state")
    return p


def _block(p: Picture, down: int, place: Callable[[Picture, int, int], None]) -> Picture:
    """A block of masks over the target's states, so far ``down``; ``place(picture, slot, x)`` draws what is above."""
    _target(p, 40, 170 + down, ("layer 2", "layer L/2", "layer L-3", "LM head"))
    p.box(250, 116 + down, 130, 44, "fc, norm\ncontext before t", "trained")
    for number in range(3):
        p.arrow((192, 184 + down - 34 * number), (246, 138 + down))
    p.box(420, 106 + down, 280, 54, "decoder layers: every slot sees\nthe context and the whole block", "trained")
    p.arrow((382, 138 + down), (416, 138 + down))
    for number, label in enumerate(("token t", "mask", "mask", "mask")):
        x = 420 + 72 * number
        p.box(x, 190 + down, 64, 28, label, "token")
        p.arrow((x + 32, 188 + down), (x + 32, 163 + down))
        place(p, number, x)
    return p


def _corrected(p: Picture, x: int, label: str, token: str) -> None:
    """A correction above a slot, and what is drafted by both."""
    p.arrow((x + 32, 134), (x + 32, 110))
    p.box(x, 78, 64, 30, label, "trained")
    p.arrow((x + 32, 76), (x + 32, 60))
    p.text(x + 32, 50, token, "middle")


def dflash() -> Picture:
    """A block of masks over the target's states."""

    def place(p: Picture, number: int, x: int) -> None:
        if number:
            p.arrow((x + 32, 104), (x + 32, 80))
            p.text(x + 32, 68, f"t+{number}", "middle")

    p = Picture(720, 260, "DFlash: a block of masks that reads the target's hidden states, all tokens in one pass")
    _block(p, 0, place)
    p.text(420, 242, "one pass however long the draft; no slot knows what another drafted")
    return p


def dspark() -> Picture:
    """A block whose slots follow one another."""

    def place(p: Picture, number: int, x: int) -> None:
        _corrected(p, x, "+ W2 W1", f"t+{number + 1}")
        if number:
            p.arrow((x - 30, 56), (x + 4, 76))

    p = Picture(720, 300, "DSpark: DFlash's block, whose anchor drafts too, and a table that reads drafted tokens")
    _block(p, 30, place)
    p.text(420, 276, "one pass for the block; then each slot reads the token before it", size=12)
    return p


def domino() -> Picture:
    """A block whose slots follow a recurrent state."""

    def place(p: Picture, number: int, x: int) -> None:
        if number:
            _corrected(p, x, "+ P SiLU", f"t+{number}")

    p = Picture(720, 300, "Domino: DFlash's block, and a GRU that reads all drafted tokens")
    _block(p, 30, place)
    p.box(250, 78, 130, 30, "GRU", "trained")
    p.arrow((382, 93), (488, 93))
    p.text(315, 66, "token t, t+1, t+2", "middle")
    p.text(420, 276, "one pass for the block; then each slot reads all tokens before it", size=12)
    return p


def p_eagle() -> Picture:
    """EAGLE-3's head over masks."""
    p = Picture(720, 270, "P-EAGLE: EAGLE-3's head with masks in the place of what is drafted")
    _target(p, 40, 170, ("layer 2", "layer L/2", "layer L-3", "LM head"))
    p.box(250, 116, 110, 44, "fc, norms", "trained")
    for number in range(3):
        p.arrow((192, 184 - 34 * number), (246, 138))
    p.box(410, 84, 290, 64, "decoder layers, causal: a mask sees the text\nand the masks before it", "trained")
    p.arrow((362, 132), (406, 132))
    for number, label in enumerate(("token t", "mask", "mask")):
        x = 410 + 99 * number
        p.box(x, 176, 92, 44, label + ("" if number == 0 else "\nand its state"), "trained" if number else "token")
        p.arrow((x + 46, 174), (x + 46, 151))
        p.arrow((x + 46, 82), (x + 46, 64))
        p.text(x + 46, 52, f"t+{number + 1}", "middle")
    p.text(410, 250, "one pass over all masks; no mask knows what was drafted", size=12)
    return p


def pard() -> Picture:
    """A small language model over masks."""
    p = Picture(720, 250, "PARD: a draft model that reads masks in the place of what is drafted")
    _target(p, 40, 160, ("layer 1", "layers 2 … L-1", "layer L", "LM head"))
    p.arrow((195, 72), (316, 104))
    p.text(255, 56, "distilled while training", "middle")
    p.box(320, 84, 380, 64, "few layers, LM head, causal: a mask sees the text\nand the masks before it", "trained")
    for number, label in enumerate(("tokens so far", "token t", "mask", "mask")):
        x = 320 + 96 * number
        p.box(x, 176, 92, 28, label, "token")
        p.arrow((x + 46, 174), (x + 46, 151))
        if number:
            p.arrow((x + 46, 82), (x + 46, 64))
            p.text(x + 46, 52, f"t+{number}", "middle")
    p.text(320, 230, "one pass however long the draft; no mask knows what was drafted", size=12)
    return p


def kangaroo() -> Picture:
    """The target's first layers, and an adapter behind them."""
    p = Picture(720, 270, "Kangaroo: the target's first layers draft, and an adapter behind them")
    _target(p, 40, 190, ("layers 1, 2", "layers 3 … L-1", "layer L", "LM head"))
    p.box(300, 108, 150, 44, "norm, attention,\nnorm", "trained")
    p.arrow((192, 204), (375, 204), (375, 155))
    p.text(284, 194, "of every token, drafted ones too", "middle", size=12)
    p.box(300, 56, 150, 28, "the target's LM head")
    p.arrow((375, 106), (375, 87))
    p.arrow((452, 70), (500, 70))
    p.text(508, 74, "token t+1, which goes")
    p.text(508, 90, "through the first layers")
    p.text(508, 106, "again for token t+2, …")
    p.text(300, 250, "one cache: verification goes on where the draft's layers end", size=12)
    return p


PICTURES = {
    "draft-model": draft_model,
    "medusa": medusa,
    "hydra": hydra,
    "redrafter": redrafter,
    "eagle-1": eagle1,
    "eagle-3": eagle3,
    "p-eagle": p_eagle,
    "mtp": mtp,
    "dflash": dflash,
    "pard": pard,
    "dspark": dspark,
    "domino": domino,
    "kangaroo": kangaroo,
}
