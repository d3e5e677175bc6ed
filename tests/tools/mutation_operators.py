"""Mutation operators: all changes of one operator, constant, argument or statement of some code.

`exercise_mutants.py` applies them to the solutions of lessons, `random_mutants.py` to the library.
"""

import ast
from collections.abc import Iterator
from copy import deepcopy

PAIRS = {ast.Add: ast.Sub, ast.Mult: ast.Div, ast.Lt: ast.LtE, ast.Gt: ast.GtE}
PAIRS |= {ast.Eq: ast.NotEq, ast.In: ast.NotIn, ast.Is: ast.IsNot}
PAIRS |= {"min": "max", "amax": "amin", "maximum": "minimum"}
PAIRS |= {"no_grad": "enable_grad", "any": "all"}
OTHERS = PAIRS | {other: one for one, other in PAIRS.items()}
OTHERS |= {ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult, ast.MatMult: ast.Mult, ast.BitOr: ast.BitAnd}
SYMMETRIC = {"min", "max", "torch.maximum", "torch.minimum"}  # whose arguments may be exchanged


def mutants(source: str, *, first_statement_only: bool = False) -> dict[str, str]:
    """Map the description of each small mistake that the code can have to the code with it.

    Args:
        source: Code to change.
        first_statement_only: Whether to leave out the statements inside the first one, such as the
            body of an `if`, and all later statements.
    """
    found: dict[str, str] = {}
    original = ast.parse(source)
    codes = {ast.unparse(original)}
    for place, (node, statement) in enumerate(_with_statements(original)):
        if first_statement_only and statement is not original.body[0]:
            continue
        for description, replacement in _replacements(node, source):
            tree = ast.parse(source)
            _replace(tree, [each for each, _ in _with_statements(tree)][place], replacement)
            code = ast.unparse(ast.fix_missing_locations(tree))
            if code in codes:
                continue
            codes.add(code)
            if isinstance(node, ast.Constant) or description in found:
                description = f"{description} in `{ast.unparse(statement).splitlines()[0]}`"
            count = sum(
                name == description or name.startswith(f"{description} (") for name in found
            )
            found[f"{description} ({count + 1})" if count else description] = code
    return found


def _with_statements(
    node: ast.AST, statement: ast.stmt | None = None
) -> Iterator[tuple[ast.AST, ast.stmt | None]]:
    """Yield every node with the innermost statement that contains it."""
    if isinstance(node, ast.stmt):
        statement = node
    yield node, statement
    for child in ast.iter_child_nodes(node):
        yield from _with_statements(child, statement)


Replacement = ast.AST | list[ast.stmt]


def _replacements(node: ast.AST, source: str) -> Iterator[tuple[str, Replacement]]:
    """Yield what can replace a node by mistake, each with its description."""
    shown = ast.unparse(node) if hasattr(node, "lineno") else ""
    with_graphs = any(word in source for word in ("gradient", "checkpoint", "hooks"))

    def changed(**fields: object) -> tuple[str, ast.AST]:
        copy = deepcopy(node)
        for field, value in fields.items():
            setattr(copy, field, value)
        return f"{shown} → {ast.unparse(copy)}", copy

    match node:
        case ast.Expr() if _is_check(node):
            return
        case ast.With():
            yield f"without `{shown.splitlines()[0]}`", node.body
        case ast.FunctionDef() | ast.ClassDef() | ast.Import() | ast.ImportFrom() | ast.Pass():
            return
        case ast.stmt():
            yield f"without `{shown.splitlines()[0]}`", [ast.Pass()]
    match node:
        case ast.BinOp() | ast.AugAssign() if type(node.op) in OTHERS:
            yield changed(op=OTHERS[type(node.op)]())
        case ast.Compare() if type(node.ops[0]) in OTHERS:
            yield changed(ops=[OTHERS[type(node.ops[0])](), *node.ops[1:]])
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield f"{shown} → {ast.unparse(node.operand)}", node.operand
        case ast.Constant(value=bool()):
            yield changed(value=not node.value)
        case ast.Constant(value=float()):
            yield changed(value=2 * node.value)
        case ast.Constant(value=int()):
            yield changed(value=node.value + 1)
            yield changed(value=node.value - 1)
        case ast.Name() if node.id in OTHERS:
            yield changed(id=OTHERS[node.id])
        case ast.Attribute() if node.attr in OTHERS:
            yield changed(attr=OTHERS[node.attr])
        case ast.Return() if with_graphs and isinstance(node.value, ast.Name | ast.Call):
            yield changed(value=_detached(node.value))
        case ast.Slice():
            for end in ("lower", "upper"):
                if getattr(node, end) is not None:
                    yield f"[{shown}] without its {end} end", changed(**{end: None})[1]
        case ast.Call() if not _is_check(node):
            args = node.args
            if ast.unparse(node.func) not in SYMMETRIC:
                for i in range(len(args) - 1):
                    yield changed(args=[*args[:i], args[i + 1], args[i], *args[i + 2 :]])
            for i, each in enumerate(args):
                if with_graphs and isinstance(each, ast.Name):
                    yield changed(args=[*args[:i], _detached(each), *args[i + 1 :]])
            if isinstance(node.func, ast.Attribute) and not args and not node.keywords:
                yield f"{shown} → {ast.unparse(node.func.value)}", node.func.value


def _detached(node: ast.expr) -> ast.expr:
    return ast.Call(ast.Attribute(node, "detach", ast.Load()), [], [])


def _is_check(node: ast.AST) -> bool:
    call = node.value if isinstance(node, ast.Expr) else node
    return isinstance(call, ast.Call) and "check_" in ast.unparse(call.func)


def _replace(tree: ast.AST, old: ast.AST, new: Replacement) -> None:
    """Replace a node of a tree by an expression or by statements."""
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
            elif isinstance(value, list) and any(each is old for each in value):
                place = next(i for i, each in enumerate(value) if each is old)
                value[place : place + 1] = new if isinstance(new, list) else [new]
