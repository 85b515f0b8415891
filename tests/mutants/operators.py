"""Small changes of a source file, each of which a test should notice."""

import ast
import copy
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

SWAPPED: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
OPPOSITES = {"min": "max", "minimum": "maximum", "amin": "amax", "argmin": "argmax", "zeros_like": "ones_like"}
OPPOSITES |= {other: name for name, other in OPPOSITES.items()}
# Calls that return what they are called on, changed: the mutant leaves them out.
CHANGES = {"abs", "add_", "clamp", "clamp_", "cumsum", "detach", "div_", "exp", "exp_", "log", "log_", "mul_", "neg_"}
CHANGES |= {"sub_", "tril", "triu", "unsqueeze", "flip", "sqrt", "rsqrt", "square", "cos", "sin", "log_softmax"}
CHANGES |= {"softmax", "requires_grad_", "masked_fill", "where"}


@dataclass(frozen=True)
class Mutant:
    """A change of one line, or of one expression over several: ``function`` is where, ``before`` and ``after`` are the
    lines without their indentation, ``lines`` their numbers, ``source`` the whole file with the change."""

    function: str
    before: str
    after: str
    lines: range
    source: str
    at_import: bool

    @property
    def key(self) -> tuple[str, str, str]:
        """What names the mutant when lines above it come and go."""
        return self.function, self.before, self.after


def mutants(source: str) -> list[Mutant]:
    """All mutants of a source file, without two that are the same."""
    found = {}
    for node, function, at_import, text in _replacements(ast.parse(source)):
        mutant = _mutant(source, node, function, at_import, text)
        if mutant is not None:
            found.setdefault((mutant.lines.start, mutant.key), mutant)
    return list(found.values())


def _mutant(source: str, node: ast.expr | ast.stmt, function: str, at_import: bool, text: str) -> Mutant | None:
    lines = source.splitlines(keepends=True)
    assert node.end_lineno is not None and node.end_col_offset is not None
    first, last = node.lineno - 1, node.end_lineno - 1
    head = lines[first].encode()[: node.col_offset].decode()
    tail = lines[last].encode()[node.end_col_offset :].decode()
    changed = "".join([*lines[:first], head, text, tail, *lines[last + 1 :]])
    try:
        ast.parse(changed)
    except SyntaxError:
        return None
    # What a loop goes on or ends with is named together with the line above it: there are many alike.
    above = lines[first - 1] if isinstance(node, ast.Continue | ast.Break) else ""
    before = " ".join((above + "".join(lines[first : last + 1])).split())
    after = " ".join((above + head + text + tail).split())
    return Mutant(function, before, after, range(first + 1, last + 2), changed, at_import)


Replacement = tuple[ast.expr | ast.stmt, str, bool, str]


def _replacements(tree: ast.Module) -> Iterator[Replacement]:
    """(node, where it stands, whether it runs at import, what it becomes)."""
    yield from _visit(tree.body, "", True, set())


def _visit(body: list[ast.stmt], function: str, at_import: bool, names: set[str]) -> Iterator[Replacement]:
    """``names``: those that have a value already, so that an assignment to them can be left out."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            inner = f"{function}.{statement.name}".lstrip(".")
            arguments = statement.args
            for default in [*arguments.defaults, *filter(None, arguments.kw_defaults)]:
                for replaced, text in _expressions(default):
                    yield replaced, inner, True, text
            known = {argument.arg for argument in [*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs]}
            yield from _visit(statement.body, inner, False, known)
        elif isinstance(statement, ast.ClassDef):
            yield from _visit(statement.body, f"{function}.{statement.name}".lstrip("."), True, set())
        else:
            yield from ((node, function, at_import, text) for node, text in _statement(statement, names))
            for field in ("body", "orelse", "finalbody"):
                yield from _visit(getattr(statement, field, []), function, at_import, names)
            for handler in getattr(statement, "handlers", []):
                yield from _visit(handler.body, function, at_import, names)
            names |= {name.id for name in ast.walk(statement) if _is_stored(name)}


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _statement(node: ast.stmt, names: set[str]) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Pass() | ast.Global() | ast.Nonlocal():
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Expr(value=ast.Constant()):
            return  # a docstring
        case ast.Raise():
            yield node, "pass"
            return
        case ast.Expr(value=ast.Call(func=ast.Name(id="warn" | "print"))):
            yield node, "pass"
            return
        case ast.Expr():
            yield node, "pass"
        case ast.Continue():
            yield node, "pass"
            yield node, "break"
        case ast.Break():
            yield node, "pass"
            yield node, "continue"
        case ast.AugAssign():
            yield node, "pass"
            for operator in SWAPPED.get(type(node.op), ()):
                changed = copy.copy(node)
                changed.op = operator()  # type: ignore[assignment]
                yield node, ast.unparse(changed)
        case ast.Assign():
            targets = [name for target in node.targets for name in ast.walk(target) if _is_stored(name)]
            if all(name.id in names for name in targets):  # an attribute or an element of something counts as known
                yield node, "pass"
        case ast.If(test=test) | ast.While(test=test) if not isinstance(test, ast.Compare | ast.UnaryOp):
            yield test, f"not ({ast.unparse(test)})"
    for field in ("value", "test", "iter"):
        value = getattr(node, field, None)
        if isinstance(value, ast.expr):
            yield from _expressions(value)
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _expressions(target)
    for item in getattr(node, "items", []):
        yield from _expressions(item.context_expr)


def _expressions(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    match node:
        case ast.JoinedStr() | ast.Lambda(body=ast.JoinedStr()):
            return
        case ast.Call(func=ast.Name(id="isinstance" | "cast" | "super" | "warn" | "print")):
            return
        case ast.BinOp(op=ast.BitOr()) if _is_type(node):
            return
    if isinstance(node, ast.expr):
        for text in _changes(node):
            yield node, text
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.keyword) and child.arg == "strict"):  # of zip: it changes no result
            yield from _expressions(child)


def _is_type(node: ast.expr) -> bool:
    """Whether an expression is a union of types."""
    if isinstance(node, ast.BinOp):
        return _is_type(node.left) or _is_type(node.right)
    return isinstance(node, ast.Name) and (node.id[0].isupper() or node.id in ("int", "float", "str", "dict", "list"))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _changes(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            if _is_text(left) or _is_text(right):
                return
            for operator in SWAPPED.get(type(op), ()):
                yield ast.unparse(ast.BinOp(left, operator(), right))  # type: ignore[arg-type]
            if isinstance(op, ast.Add | ast.Sub | ast.Mult | ast.Div):
                yield f"({ast.unparse(left)})"
            if isinstance(op, ast.Mult):
                yield f"({ast.unparse(right)})"
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            for operator in SWAPPED.get(type(op), ()):
                yield f"({ast.unparse(ast.Compare(left, [operator()], [right]))})"  # type: ignore[list-item]
        case ast.Compare(left=left, ops=[one, two], comparators=[middle, right]):
            for operator in SWAPPED.get(type(one), ())[:1]:
                yield f"({ast.unparse(ast.Compare(left, [operator(), two], [middle, right]))})"  # type: ignore[list-item]
            for operator in SWAPPED.get(type(two), ())[:1]:
                yield f"({ast.unparse(ast.Compare(left, [one, operator()], [middle, right]))})"  # type: ignore[list-item]
        case ast.BoolOp(op=op, values=values):
            yield f"({ast.unparse(ast.BoolOp(SWAPPED[type(op)][0](), values))})"  # type: ignore[arg-type]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as value)):
            yield str(-value + 1) if value > 1 else "0"
        case ast.UnaryOp(op=ast.USub() | ast.Invert(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield f"({ast.unparse(ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse))})"
        case ast.Constant(value=bool() as value):
            yield str(not value)
        case ast.Constant(value=int() as value):
            yield str(value + 1)
        case ast.Constant(value=float() as value):
            yield str(value * 2 if value else 1.0)
        case ast.Subscript(slice=ast.Slice() as taken):
            for field in ("lower", "upper"):
                bound = getattr(taken, field)
                if bound is not None and not isinstance(bound, ast.Constant):
                    moved = copy.deepcopy(node)
                    setattr(moved.slice, field, ast.BinOp(bound, ast.Add(), ast.Constant(1)))
                    yield ast.unparse(moved)
        case ast.Call(func=ast.Attribute(value=receiver, attr=name)):
            if name in CHANGES and not (isinstance(receiver, ast.Name) and receiver.id == "torch"):
                yield f"({ast.unparse(receiver)})"
            if name in OPPOSITES:
                changed = copy.deepcopy(node)
                changed.func.attr = OPPOSITES[name]  # type: ignore[attr-defined]
                yield ast.unparse(changed)
            if name in ("clamp", "clamp_"):
                changed = copy.deepcopy(node)
                for keyword in changed.keywords:
                    keyword.arg = OPPOSITES.get(keyword.arg or "", keyword.arg)
                yield ast.unparse(changed)
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            changed = copy.deepcopy(node)
            changed.func = ast.Name(OPPOSITES[name])
            yield ast.unparse(changed)


def diff(source: str, mutant: Mutant, name: str) -> str:
    """The change as a patch without context."""
    lines = difflib.unified_diff(source.splitlines(), mutant.source.splitlines(), name, name, n=0, lineterm="")
    return "\n".join(list(lines)[2:])
