"""Messages with which the package refuses something or warns: those of its rules, and those found in its source.

The search starts at errors that are raised, at lists of problems that ranks compare, and at warnings, and follows names and calls
back to where their texts are written. Values in a text are shown as `…`; constants of the package are written out.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from hf_longctx.hf.rules.rule import Rule

ROOT = Path(__file__).parents[2]
HOLE = "…"
# how a remedy may begin that has a semicolon itself
_BEGINS = re.compile(r"; (leave|load|pass)\b")
# calls whose first argument is a refusal, and functions that return some, beside errors that are raised
_CALLS = {"raise_together", "say_error", "refuse_saving"}
_FUNCTIONS = re.compile(r"problems?(_with)?$|refus|fault$|why_no|unusable|too_long$|nothing_fits$|_findings$|^explain$")
# calls that give back what they get
_SAME = {"list", "sorted", "tuple", "set", "str", "next", "iter", "join", "chain", "from_iterable"}
_ADD = {"append", "extend", "insert", "add"}
_ASSIGNS = ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr
_LOOPS = ast.For, ast.ListComp, ast.GeneratorExp
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTION = ast.FunctionDef, ast.AsyncFunctionDef


@dataclass(frozen=True)
class Message:
    """One message: its text, the file and the function where it stands, and whether work goes on after it.

    name, remedy, example: those of its rule, if it has one. function is then the dict of rules.
    """

    text: str
    file: str
    function: str
    is_warning: bool
    name: str = ""
    remedy: str = ""
    example: str = ""

    @property
    def parts(self) -> tuple[str, str]:
        """What was found, and what to do."""
        return (self.text.removesuffix(f"; {self.remedy}"), self.remedy) if self.name else parts(self.text)

    @property
    def anchor(self) -> str:
        """Its anchor on the pages: the name of its rule, or else what was found, as the site makes anchors of headings."""
        words = re.sub(r"[^\w\- ]", "", heading(self).strip("`").strip().lower())
        return self.name or words.replace(" ", "-")


def heading(message: Message) -> str:
    """What was found, on one line; the end of a message without that."""
    found = message.parts[0]
    return found if re.search(r"[a-z]", found) else " ".join(message.text.split())


def rules() -> Iterator[tuple[str, Rule, str, str]]:
    """Every rule of the package with its name, its file, and the name of the dict that it was written in."""
    places: dict[str, list[tuple[int, str, str, Rule]]] = defaultdict(list)
    for file in sorted((ROOT / "hf_longctx" / "hf").rglob("*.py")):
        if "import Facts, Rule" not in (source := file.read_text()):
            continue
        path = file.relative_to(ROOT)
        module = importlib.import_module(".".join(path.with_suffix("").parts))
        for family in re.findall(r"^(\w+)(?:: Rules)? = \{$", source, flags=re.MULTILINE):
            for name, rule in getattr(module, family).items():
                if isinstance(rule, Rule):
                    places[name].append((len(getattr(module, family)), str(path), family, rule))
    for name, found in places.items():
        if len({id(rule) for *_, rule in found}) > 1:
            raise ValueError(f"two rules have the name {name}: {', '.join(path for _, path, *_ in found)}; rename one of them")
        # dicts may include smaller ones
        _, path, family, rule = min(found, key=lambda each: each[0])
        yield name, rule, path, family


def of_rules() -> Iterator[Message]:
    """The messages of all rules."""
    for name, rule, path, family in rules():
        text, remedy = (re.sub(r"(?:(?<!\{)\{\w[^{}]*\})+", HOLE, each).format() for each in (rule.text, rule.remedy))
        yield Message(f"{text}; {remedy}", path, family, False, name, remedy, rule.example)


def parts(text: str) -> tuple[str, str]:
    """What was found, and what to do.

    They are divided by a semicolon outside of brackets, the last one or one before such a word as "leave", or by the last end of
    a line. Without either, the remedy is empty.
    """
    depth, cuts = 0, []
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == ";" and depth <= 0) or letter == "\n":
            cuts.append(place)
    cut = next((each for each in cuts if _BEGINS.match(text, each)), cuts[-1] if cuts else None)
    found, remedy = (text, "") if cut is None else (text[:cut], text[cut + 1 :])
    return " ".join(found.split()), " ".join(remedy.split())


@dataclass
class _Module:
    """One module: its tree, its functions and the texts that are constants in it."""

    path: str
    tree: ast.Module
    _inside: dict[ast.AST, _Function | None] = field(default_factory=dict)
    _bindings: dict[_Function, dict[str, list[ast.expr]]] = field(default_factory=dict)
    _nodes: dict[_Function | None, list[ast.AST]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        todo: list[tuple[ast.AST, _Function | None]] = [(self.tree, None)]
        while todo:
            node, function = todo.pop()
            self._inside[node] = function
            self._nodes[function].append(node)
            inner = node if isinstance(node, _FUNCTION) else function
            todo += [
                (child, inner) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context | ast.operator)
            ]

    def bindings(self, function: _Function) -> dict[str, list[ast.expr]]:
        """Every name that a function binds, with what it is bound to or what is put into it; arguments with nothing."""
        if function not in self._bindings:
            found = self._bindings[function] = defaultdict(list)
            for argument in ast.walk(function.args):
                if isinstance(argument, ast.arg):
                    found[argument.arg]
            for node in self._nodes[function]:
                for name, value in _bound(node):
                    found[name].append(value)
        return self._bindings[function]

    @cached_property
    def functions(self) -> list[_Function]:
        """Functions and methods, also those inside others."""
        return [node for node in self._inside if isinstance(node, _FUNCTION)]

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        """Values of names that the module itself assigns once."""
        found = {}
        for node in self.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            if node_value := getattr(node, "value", None):
                found.update({target.id: node_value for target in targets if isinstance(target, ast.Name)})
        return found

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """(module, name) of every name that comes from a module of the package."""
        return {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def function_of(self, node: ast.AST) -> _Function | None:
        """The innermost function around a node."""
        return self._inside[node]

    @property
    def nodes(self) -> Iterable[ast.AST]:
        """All nodes of the tree."""
        return self._inside

    def nodes_of(self, function: _Function | None) -> list[ast.AST]:
        """What stands in a function, without functions inside it."""
        return self._nodes[function]


class Search:
    """Finds the messages of packages in a folder."""

    def __init__(self, root: Path, *packages: str) -> None:
        files = [file for package in packages for file in sorted((root / package).rglob("*.py"))]
        self._modules = {
            ".".join(file.relative_to(root).with_suffix("").parts): _Module(
                str(file.relative_to(root)), ast.parse(file.read_text())
            )
            for file in files
        }
        self._found: dict[tuple[str, int, int, int], Message] = {}
        self._seen: set[ast.AST] = set()

    def messages(self) -> list[Message]:
        """All messages, in the order of files and lines."""
        for module in self._modules.values():
            for node in module.nodes:
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    self._follow(module, node.exc)
                elif isinstance(node, ast.Call) and _name(node.func) in _CALLS and node.args:
                    self._follow(module, node.args[0])
                elif isinstance(node, ast.Name) and node.id == "problems":
                    self._follow(module, node)
                elif isinstance(node, _FUNCTION) and _FUNCTIONS.search(node.name):
                    self._follow_returned(module, node)
                elif isinstance(node, ast.Call) and ast.unparse(node.func) == "logger.warning":
                    self._follow(module, node.args[0], is_warning=True)
        return [self._found[place] for place in sorted(self._found)]

    def _follow(self, module: _Module, value: ast.AST, is_warning: bool = False) -> None:
        """Notes the messages that may be in the value of an expression."""
        if value in self._seen:
            return
        self._seen.add(value)
        if isinstance(value, ast.Constant | ast.JoinedStr) or (isinstance(value, ast.BinOp) and _is_text(value)):
            self._note(module, value, is_warning)
        elif isinstance(value, ast.ListComp | ast.GeneratorExp | ast.SetComp):
            self._follow(module, value.elt, is_warning)
        elif isinstance(value, ast.Name):
            for home, source in self._values(module, value):
                self._follow(home, source, is_warning)
        elif isinstance(value, ast.Call):
            self._follow_call(module, value, is_warning)
        elif isinstance(value, ast.Subscript):
            self._follow(module, value.value, is_warning)
        elif isinstance(value, ast.IfExp):
            self._follow(module, value.body, is_warning)
            self._follow(module, value.orelse, is_warning)
        elif isinstance(value, ast.BoolOp | ast.List | ast.Tuple | ast.Set | ast.Starred | ast.BinOp | ast.NamedExpr | ast.Dict):
            for child in value.values if isinstance(value, ast.Dict) else ast.iter_child_nodes(value):
                self._follow(module, child, is_warning)

    def _follow_call(self, module: _Module, call: ast.Call, is_warning: bool) -> None:
        name = _name(call.func)
        if name in _SAME or name[:1].isupper() or name.lstrip("_")[:1].isupper():
            # an error, or a dataclass with a message
            for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
                self._follow(module, argument, is_warning)
            return
        for home, function in self._functions(module, call.func):
            self._follow_returned(home, function, is_warning)

    def _follow_returned(self, module: _Module, function: _Function, is_warning: bool = False) -> None:
        for node in module.nodes_of(function):
            if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) and node.value:
                self._follow(module, node.value, is_warning)

    def _functions(self, module: _Module, function: ast.expr) -> Iterator[tuple[_Module, _Function]]:
        """The functions that a call may mean: of this module, of the one it is imported from, or methods of that name."""
        name = _name(function)
        own = [each for each in module.functions if each.name == name]
        home, name = module.imports.get(name, ("", name))
        if own or home in self._modules:
            there = self._modules.get(home)
            yield from ((module, each) for each in own)
            yield from ((there, each) for each in (there.functions if there else []) if each.name == name)
        elif isinstance(function, ast.Attribute):
            for other in self._modules.values():
                yield from ((other, each) for each in other.functions if each.name == name)

    def _values(self, module: _Module, name: ast.Name) -> list[tuple[_Module, ast.expr]]:
        """Expressions that a name may stand for, or that are put into it, inside its function; else a constant."""
        function = module.function_of(name)
        if function is not None and (local := module.bindings(function).get(name.id)) is not None:
            return [(module, value) for value in local]
        home, constant = module.imports.get(name.id, ("", name.id))
        there = self._modules.get(home, module)
        return [(there, there.constants[constant])] if constant in there.constants else []

    def _note(self, module: _Module, value: ast.expr, is_warning: bool) -> None:
        function = module.function_of(value)
        for number, names in enumerate(self._rows_of_table(module, value)):
            text = re.sub(r"%[-.\d]*[sdrgfe]", HOLE, self._text(module, value, names))
            # a list in the middle is one hole, too
            text = re.sub(rf"{HOLE}(?:\s*{HOLE})+", HOLE, text).strip()
            # a name or a piece of a sentence is no message
            if len(re.findall(r"[A-Za-z]{2,}", text)) >= 4 and text.count(" ") >= 3:
                place = (module.path, value.lineno, value.col_offset, number)
                self._found[place] = Message(text, module.path, function.name if function else "", is_warning)

    def _text(self, module: _Module, value: ast.expr, names: Mapping[str, str] = MappingProxyType({})) -> str:
        """The text of an expression, with `…` for what is known only when it runs. names: texts that names stand for."""
        if isinstance(value, ast.Constant):
            return value.value if isinstance(value.value, str) else HOLE
        if isinstance(value, ast.JoinedStr):
            pieces = (each.value if isinstance(each, ast.FormattedValue) else each for each in value.values)
            return "".join(self._text(module, each, names) for each in pieces)
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            return self._text(module, value.left, names) + self._text(module, value.right, names)
        if isinstance(value, ast.Name) and value.id in names:
            return names[value.id]
        if isinstance(value, ast.Name):
            values = self._values(module, value)
            if len(values) == 1 and (_is_text(values[0][1]) or isinstance(values[0][1], ast.Constant)):
                return self._text(*values[0])
        return HOLE

    def _rows_of_table(self, module: _Module, value: ast.expr) -> list[dict[str, str]]:
        """Texts that names in a message stand for, for every row of a constant over which a loop goes; else nothing, once."""
        used = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        for around in module.nodes_of(module.function_of(value)):
            if not isinstance(around, _LOOPS) or not around.lineno <= value.lineno <= (around.end_lineno or 0):
                continue
            for loop in [around] if isinstance(around, ast.For) else around.generators:
                if table := self._table(module, loop.iter):
                    rows = [_pairs(loop.target, ast.Tuple(list(row))) for row in zip(table.keys, table.values, strict=True)]
                    texts = [{name: self._text(module, each) for name, each in row} for row in rows]
                    if used & set(texts[0]):
                        return texts
        return [{}]

    def _table(self, module: _Module, value: ast.expr) -> ast.Dict | None:
        """The constant whose items an expression is."""
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "items":
            table = module.constants.get(_name(value.func.value))
            return table if isinstance(table, ast.Dict) and table.keys and None not in table.keys else None
        return None


def _name(function: ast.expr) -> str:
    """The last name of what is called."""
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def _is_text(value: ast.expr) -> bool:
    """Whether an expression adds texts."""
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, ast.Add) and (_is_text(value.left) or _is_text(value.right))
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """The names of a loop's target, each with its part of a value."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for name, part in zip(target.elts, value.elts, strict=True):
            yield from _pairs(name, part)


def _bound(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The names that a statement binds or puts something into, with what."""
    if isinstance(node, _ASSIGNS) and node.value:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from ((target.id, node.value) for target in targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADD:
        yield from ((_name(node.func.value), value) for value in node.args)
    elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
        yield node.target.id, node.iter
