"""Find the lines of a handed-in cell that do more than an answer may do, before the cell runs.

An answer may import what the course imports, define functions, and compute. A line that changes the
course or PyTorch, uses Python's internals, opens files, or starts a process "reaches beyond an
answer" and is reported. This module examines names and strings in the code, but not values that are
computed at run time. For these, `fingerprint.py` compares the state of the library.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager

from course_lib import lessons


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _dunders(text: str) -> frozenset[str]:
    return frozenset(f"__{name}__" for name in text.split())


# Modules that an answer may import, in addition to those that its lesson imports.
MODULES = _words(
    """
    abc bisect collections contextlib copy course_lib dataclasses decimal fractions
    functools heapq itertools math numbers numpy operator random re statistics string time
    torch typing warnings weakref
    """
)
# Names that may be imported although their module may not.
_SINGLE = frozenset({"types.SimpleNamespace"})
# Modules that no answer may use, also not as attributes of other modules (`torch.os`).
_OUTSIDE = _words(
    """
    asyncio atexit builtins cpp_extension ctypes faulthandler gc hub importlib inspect IPython
    ipykernel linecache marshal mmap multiprocessing os pathlib pickle pkgutil posix psutil pty
    publish requests runpy shutil socket sqlite3 subprocess sys tempfile threading _thread
    traceback tracemalloc unittest urllib mock _os _sys _io benchmark bdb cProfile codeop copyreg
    ctypeslib doctest f2py fx library _library package pdb rundocs runstring timeit _C
    _dynamo _inductor _torch formatwarning showwarning
    """
)
_BUILTINS = _words(
    """
    __builtins__ __import__ __loader__ __spec__ breakpoint compile delattr eval exec exit
    get_ipython globals In locals open Out quit vars _ih _oh
    """
)
_BY_NAME = {"getattr": "reads", "setattr": "sets"}  # both take an attribute's name
_MACHINERY = re.compile(
    r"(__\w+__|_?f_(back|builtins|code|globals|locals)|(tb|gi|cr|ag)_(frame|next|code)"
    r"|_getframe|_current_frames|attrgetter|methodcaller|_check|_hints|_make_subclass"
    r"|bltns|get_type_hints|ForwardRef|evaluate_forward_ref|make_dataclass|singledispatch(method)?"
    r"|CodeType|FunctionType|CompilationUnit|Formatter|update_wrapper"
    r"|_disable_\w+|disable_current_modes|unset_fake_temporarily|_pop_mode\w*"
    r"|_?DisableTorch\w*|_?disabled_torch\w*)"
)
_HARMLESS = _dunders(
    """
    init name qualname doc class len enter exit call iter next getitem setitem contains
    torch_dispatch post_init version main file all annotations
    """
)
_LESSONS = Path(lessons.__file__).parent
EXERCISES = "exercises"  # the name by which cells call a lesson's checks
_FILE = re.compile(r"course_lib\.lessons\.lesson_\d\d\.[a-z]\w*")
# Modules of the course that contain the checks and their right results.
_CHECKING = frozenset(
    {"lessons", "teaching", "exercises"}
    | {
        path.stem
        for path in _LESSONS.glob("lesson_*/*.py")
        if "@exercise(" in path.read_text("utf-8")
    }
)
# Methods with which an object can compare equal to any number or tensor.
FOOLING = _dunders(
    """
    eq ne lt le gt ge hash bool int float index complex array sub rsub abs round
    torch_function instancecheck subclasscheck getattribute getattr set_name class
    init_subclass subclasshook mro_entries del
    """
)
VALUES = _words(
    """
    bool int float complex str bytes Tensor Parameter Fraction Decimal Number Real
    """
)
_FILES = _words(
    """
    dump from_file fromfile genfromtxt load loadtxt memmap open popen save savefig savetxt
    savez system tofile load_library load_inline open_memmap
    """
)
_SAFE_MAGICS = re.compile(r"\A[ \t]*%%time[ \t]*$|^[ \t]*%matplotlib[ \t]+\w+[ \t]*$", re.MULTILINE)
_FREE = frozenset({"grad", "requires_grad"})  # attributes of tensors that an answer may set
_UNREADABLE = (RecursionError, MemoryError)


@dataclass(frozen=True)
class Reach:
    """A line that does more than an answer may do, and a phrase that states what it does."""

    line: int
    what: str

    def __str__(self) -> str:
        return f"line {self.line} {self.what}"


def tree_of(source: str) -> ast.Module:
    """Return a cell's syntax tree, or an empty tree if the cell is not valid code.

    Magic commands become calls. Those that only show the time or select how figures are drawn are
    removed.
    """
    source = _SAFE_MAGICS.sub("", source)
    try:
        return ast.parse(TransformerManager().transform_cell(source))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def foreign_names(sources: Iterable[str]) -> set[str]:
    """Return the names that cells give to foreign objects: imported names and their aliases."""
    nodes = [node for source in sources for node in ast.walk(tree_of(source))]
    foreign = {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    bindings = [
        (name, value) for node in nodes for name, value in _bindings(node) if value is not None
    ]
    while added := {
        name for name, value in bindings if name not in foreign and _may_be_foreign(value, foreign)
    }:
        foreign |= added
    return foreign


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield (name, expression) for each name that a statement binds to an expression."""
    targets: list[ast.expr] = []
    value: ast.expr | None = None
    match node:
        case ast.Assign():
            targets, value = node.targets, node.value
        case ast.AnnAssign() | ast.AugAssign() | ast.NamedExpr():
            targets.append(node.target)
            value = node.value
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            targets.append(node.target)
            value = node.iter
        case ast.withitem() if node.optional_vars is not None:
            targets.append(node.optional_vars)
            value = node.context_expr
        case ast.Match():
            names = [n.name for n in ast.walk(node) if isinstance(n, ast.MatchAs | ast.MatchStar)]
            yield from ((name, node.subject) for name in names if name)
    for target in targets:
        for each in ast.walk(target):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                yield each.id, value


def _may_be_foreign(value: ast.expr, foreign: set[str]) -> bool:
    """Return whether the value of an expression may be a foreign object.

    The result of a call is not foreign if no argument is, even if the function is foreign.
    """
    todo: list[ast.AST] = [value]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Call):
            todo += [*node.args, *(keyword.value for keyword in node.keywords)]
            if not isinstance(node.func, ast.Name | ast.Attribute):
                todo.append(node.func)
            elif isinstance(node.func, ast.Name) and node.func.id in (*_BY_NAME, "vars"):
                return True
        elif isinstance(node, ast.Name):
            if node.id in foreign:
                return True
        elif not (isinstance(node, ast.Attribute) and isinstance(_root(node), ast.Call)):
            todo += ast.iter_child_nodes(node)
    return False


def reaches(
    source: str, foreign: set[str], modules: Iterable[str] = (), of_exercises: Iterable[str] = ()
) -> list[Reach]:
    """Return the lines of a cell that do more than an answer may do, in ascending order.

    Args:
        foreign: Names that stand for objects of the course and of libraries (`foreign_names`).
        modules: Modules that the lesson imports, which its answers may import as well.
        of_exercises: Names of `exercises`, other than checks, that the lesson's cells use.
    """
    try:
        tree = tree_of(source)
        allowed = set(modules)
        files = {path.rpartition(".")[2] for path in allowed if _FILE.fullmatch(path)}
        always = {"course_lib", EXERCISES}
        inside = _inside_functions(tree)
        found = {
            Reach(getattr(node, "lineno", 1), what)
            for node, own in _with_own_names(tree)
            for kept in [always if id(node) in inside else always | files]
            for what in (*_reach(node, foreign - own, own, kept), *_import(node, allowed, kept))
        }
        found |= {Reach(line, "tries answers with a check") for line in _repeated_checks(tree)}
        found |= {Reach(line, what) for line, what in _uses_of_exercises(tree, {*of_exercises})}
    except _UNREADABLE:
        return [Reach(1, "is nested too deeply to be read")]
    return sorted(found, key=lambda each: (each.line, each.what))


_REPEATED = (
    *(ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


def _repeated_checks(tree: ast.Module) -> Iterator[int]:
    """Yield the numbers of lines with an unusual use of an exercise's check.

    The line uses the check in a loop or function, or uses it without calling it.
    """
    todo: list[tuple[ast.AST, bool, bool]] = [(tree, False, False)]
    while todo:
        node, repeated, is_used = todo.pop()
        if isinstance(node, ast.Attribute) and node.attr.startswith("check_"):
            if _last_name(node.value) == EXERCISES and (repeated or not is_used):
                yield node.lineno
        repeated |= isinstance(node, _REPEATED)
        for child in ast.iter_child_nodes(node):
            called = isinstance(node, ast.Call) and child is node.func
            todo.append((child, repeated, called or isinstance(node, ast.Attribute)))


def _inside_functions(tree: ast.Module) -> set[int]:
    """Return the ids of all nodes inside functions, whose local names other cells cannot use.

    The set is empty if the cell has a `global` statement.
    """
    nodes = [*ast.walk(tree)]
    if any(isinstance(node, ast.Global) for node in nodes):
        return set()
    functions = (n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return {id(node) for function in functions for each in function.body for node in ast.walk(each)}


def _uses_of_exercises(tree: ast.Module, known: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, phrase) for each use of `exercises`, except checks and names in `known`.

    A use without an attribute is also reported, because aliases of `exercises` are not tracked.
    """
    names = {
        id(node.value): node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and _is_exercises(node.value)
    }
    for node in ast.walk(tree):
        if _is_exercises(node):
            name = names.get(id(node), "")
            if not name:
                yield node.lineno, f"passes {EXERCISES} on"
            elif not name.startswith("check_") and name not in known:
                yield node.lineno, f"uses {EXERCISES}.{name}, a part of the checks"


def _is_exercises(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == EXERCISES and isinstance(node.ctx, ast.Load)


def _with_own_names(tree: ast.AST) -> Iterator[tuple[ast.AST, frozenset[str]]]:
    """Yield (node, parameters of the functions that contain the node) for every node."""
    todo: list[tuple[ast.AST, frozenset[str]]] = [(tree, frozenset())]
    while todo:
        node, own = todo.pop()
        yield node, own
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            own |= {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        todo += [(child, own) for child in ast.iter_child_nodes(node)]


def _reach(node: ast.AST, foreign: set[str], own: frozenset[str], files: set[str]) -> Iterator[str]:
    """Yield a phrase for each thing that a node does beyond what an answer may do.

    Imports are left out, because `_import` examines them.
    """
    match node:
        case ast.Name(id=name) if name in _BUILTINS - own:
            yield f"uses {name}"
        case ast.Name(id=name) if name in _OUTSIDE & foreign:
            yield f"uses {name}"
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()) if _is_lesson(name, files):
            yield f"changes {name}, which the lesson imports"
        case (
            ast.FunctionDef(name=str(name))
            | ast.ClassDef(name=str(name))
            | ast.ExceptHandler(name=str(name))
            | ast.MatchAs(name=str(name))
            | ast.MatchStar(name=str(name))
        ) if _is_lesson(name, files):
            yield f"changes {name}, which the lesson imports"
        case ast.Attribute(attr=name) if name in _OUTSIDE or _is_internal(name):
            yield f"uses {name}"
        case ast.Attribute(attr=name, value=ast.Name(id=home)) if (
            home in foreign and name in _CHECKING
        ):
            yield f"uses {home}.{name}, a module of the checks"
        case ast.Attribute(attr="testing", value=ast.Name(id=home)) if home != "torch":
            yield "uses testing, which runs code"
        case ast.Attribute(attr=name) if name in _FILES and _is_foreign(node, foreign):
            yield f"uses {name}, which reads or writes files"
        case ast.MatchClass(kwd_attrs=names) if any(
            name in _OUTSIDE or _is_internal(name) for name in names
        ):
            yield f"reads {', '.join(names)}"
        case ast.Constant(value=str(name)) if _is_internal(name) or name in FOOLING:
            yield f"names {name}"
    match node:
        case (
            ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del())
        ):
            # a cell may change the elements of its own lists and tensors
            local = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
            attribute = getattr(node, "attr", "")
            if attribute[:2] == "__" or (
                attribute not in _FREE and not local and _is_foreign(node, foreign)
            ):
                yield f"changes {ast.unparse(node)[:60]}"
        case ast.Call(func=ast.Name(id=name), args=args) if name in _BY_NAME:
            if len(args) < 2 or not isinstance(args[1], ast.Constant):
                yield f"{_BY_NAME[name]} an attribute with a computed name"
            elif args[1].value in _OUTSIDE:
                yield f"uses {args[1].value}"
            elif name == "setattr" and _is_foreign(args[0], foreign):
                yield f"changes {ast.unparse(args[0])[:60]}"
        case ast.Call(keywords=keywords) if any(
            each.arg in ("assigned", "updated") for each in keywords
        ):
            yield "copies attributes with computed names"
        case ast.Call(func=ast.Name(id="type"), args=[_, bases, *_]):
            if {each for n in ast.walk(bases) if (each := _last_name(n)) in VALUES}:
                yield "derives a class from a number or a tensor"
        case ast.ClassDef(bases=bases, keywords=keywords):
            if {_last_name(base) for base in bases} & VALUES:
                yield f"derives {node.name} from a number or a tensor"
            if any(keyword.arg in (None, "metaclass") for keyword in keywords):
                yield f"gives {node.name} a metaclass"
            bound = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            bound |= {name for each in ast.walk(node) for name, _ in _bindings(each)}
            if any(_has_computed_match_args(each) for each in node.body):
                yield f"computes __match_args__ of {node.name}"
            if methods := sorted(bound & FOOLING):
                yield f"defines {methods[0]} in {node.name}"
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Name) and child.id in _BY_NAME:
            if not (isinstance(node, ast.Call) and child is node.func):
                yield f"passes {child.id} on"


def _has_computed_match_args(node: ast.stmt) -> bool:
    return any(
        name == "__match_args__"
        and not (
            isinstance(value, ast.Tuple | ast.List)
            and all(isinstance(each, ast.Constant) for each in value.elts)
        )
        for each in ast.walk(node)
        for name, value in _bindings(each)
    )


def _import(node: ast.AST, allowed: set[str], files: set[str]) -> Iterator[str]:
    """Yield a phrase for each imported name that an answer may not import."""
    if isinstance(node, ast.Import):
        pairs = [(alias.name, alias.asname or "") for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        pairs = [(f"{node.module}.{alias.name}", alias.asname or "") for alias in node.names]
    else:
        return
    for path, name in pairs:
        parts = path.split(".")
        if parts[0] == "__future__":
            continue
        home = ".".join(parts[:-1]) if isinstance(node, ast.ImportFrom) else path
        inner = re.match(r"course_lib\.(lessons|teaching)", path)
        known = {path, home} & (allowed | _SINGLE)
        if path.startswith("course_lib.lessons"):  # only `from ... import NAME`
            known = {path} & allowed if isinstance(node, ast.ImportFrom) and not name else set()
        if (
            (parts[0] not in MODULES and not known)
            or (inner and not known)
            or path.startswith("numpy.testing")
            or {*parts} & (_OUTSIDE | _FILES | {"*"})
            or any(_is_internal(part) for part in parts)
        ):
            yield f"imports {path}"
        if _is_lesson(name or parts[-1], files) and not (inner and known):
            yield f"changes {name or parts[-1]}, which the lesson imports"


def _is_lesson(name: str, files: set[str]) -> bool:
    """Return whether a name is that of a lesson, such as "lesson_02", or of a file in `files`."""
    return name in files or bool(re.fullmatch(r"lesson_\d\d", name))


def _is_internal(name: str) -> bool:
    return bool(_MACHINERY.fullmatch(name)) and name not in _HARMLESS


def _root(node: ast.AST) -> ast.AST:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        node = node.value
    return node


def _is_foreign(node: ast.AST, foreign: set[str]) -> bool:
    """Return whether the object of an attribute is foreign, as in `torch.y` or `type(x).y`."""
    root = _root(node)
    return not isinstance(root, ast.Name) or root.id in foreign


def _last_name(node: ast.AST) -> str:
    return getattr(node, "attr", "") or getattr(node, "id", "")
