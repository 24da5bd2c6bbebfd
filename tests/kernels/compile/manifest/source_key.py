"""Digests of code that depend on what it does: not on its place, its layout, its comments or Python's version."""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import inspect
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[4]
_TEST_MODULES = "tests.kernels.compile.test_"
_WITHOUT_EFFECT = {"ctx", "kind", "type_comment"}
"""Fields of syntax trees that follow from others, or that no program reads."""
_ADDRESS = " at 0x"
"""Part of the text of an object that has no text of its own; such a text differs in every process."""


def digest_of(*parts: object) -> str:
    """Return a digest of the texts of some values, 64 hexadecimal characters."""
    texts = [str(part) for part in parts]
    for text in texts:
        assert _ADDRESS not in text, f"{text[:200]} differs in every process"
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def tree_text(node: Any) -> str:
    """Write a syntax tree as text, without positions, comments, docstrings and fields that are empty.

    `ast.dump` and `ast.unparse` write one program differently in different versions of Python.
    """
    if isinstance(node, ast.Constant):
        return f"{type(node.value).__name__} {node.value!r}"
    if isinstance(node, list):
        statements = [it for it in node if not _is_text_alone(it)]
        return "[" + ", ".join(tree_text(it) for it in statements) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):
        # Python 3.12 puts an empty text behind the last field of an f-string's format.
        parts = [it for it in node.values if not _is_empty(it)]
        return f"JoinedStr({', '.join(map(tree_text, parts))})"
    fields = [
        f"{name}={tree_text(value)}"
        for name, value in sorted(ast.iter_fields(node))
        if name not in _WITHOUT_EFFECT and value is not None and value != []
    ]
    return f"{type(node).__name__}({', '.join(fields)})"


def _is_text_alone(node: Any) -> bool:
    constant = node.value if isinstance(node, ast.Expr) else None
    return isinstance(constant, ast.Constant) and isinstance(constant.value, str)


def _is_empty(node: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value == ""


def checks_key(path: Path, function: str) -> str:
    """Return a digest of a test's function and of all that it uses from its own module and from other test modules.

    Args:
        path: of the test's module.
        function: name of the test's function. Its decorators, which list its cases, are not part of the digest.
    """
    found: dict[tuple[str, str], str] = {}
    pending = [(path, function)]
    while pending:
        file, name = pending.pop()
        key = (file.name, name)
        if key in found:
            continue
        definitions, imports = _module(file)
        texts = []
        for statement in definitions.get(name, []):
            node = copy.copy(statement)
            if isinstance(node, ast.FunctionDef) and key == (path.name, function):
                node.decorator_list = []
            texts.append(tree_text(node))
            pending += [
                imports.get(it.id, (file, it.id))
                for it in ast.walk(node)
                if isinstance(it, ast.Name) and (it.id in definitions or it.id in imports)
            ]
        found[key] = " ".join(texts)
    assert found[path.name, function], f"{path} has no function {function}"
    return digest_of(*sorted(found.items()))


@functools.cache
def _module(file: Path) -> tuple[dict[str, list[ast.stmt]], dict[str, tuple[Path, str]]]:
    """Return the statements that define each name of a module, and the names that it imports from test modules."""
    definitions: dict[str, list[ast.stmt]] = {}
    imports: dict[str, tuple[Path, str]] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (
                it.id for target in targets for it in ast.walk(target) if isinstance(it, ast.Name)
            ):
                definitions.setdefault(name, []).append(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_TEST_MODULES):
            source = _ROOT / (str(node.module).replace(".", "/") + ".py")
            imports |= {it.asname or it.name: (source, it.name) for it in node.names}
    return definitions, imports


def kernel_key(function: Any) -> str:
    """Return a digest of a kernel and of all device functions and constants that it uses, directly or through others.

    Triton's own key also has the lines where the functions stand, so that an edit above them changes it.

    Args:
        function: a function of Triton or Gluon. It and what it uses must not change during the process.
    """
    found: dict[int, str] = {}
    pending = [function]
    while pending:
        it = pending.pop()
        if id(it) not in found:
            if id(it) not in _OWN_PARTS:
                _OWN_PARTS[id(it)] = (it, *_own_parts(it))
            _, found[id(it)], called = _OWN_PARTS[id(it)]
            pending += called
    return digest_of(*sorted(found.values()))


_OWN_PARTS: dict[int, tuple[Any, str, list[Any]]] = {}
"""Device functions by their ids, each with what `_own_parts` returns."""


def _own_parts(function: Any) -> tuple[str, list[Any]]:
    """Return a digest of a device function without those that it uses, and these."""
    from triton.language.core import constexpr
    from triton.runtime.jit import DependenciesFinder

    called: list[Any] = []
    constants: list[str] = []

    class Finder(DependenciesFinder):  # type: ignore[misc] # Triton has no types
        def _update_hash(self, func: Any) -> None:
            called.append(func)

        def record_reference(self, val: Any, var_dict: Any = None, name: Any = None) -> None:
            if isinstance(val, constexpr | bool | int | float | str | tuple):
                constants.append(f"{name} {value_text(val)}")
            if getattr(val, "__triton_aggregate__", False):
                constants.append(_class_text(val))
            super().record_reference(val, var_dict, name)

    nonlocals = inspect.getclosurevars(function.fn).nonlocals
    tree = function.parse()
    Finder(function.__name__, function.__globals__, nonlocals, "").visit(tree)
    is_inlined = not getattr(function, "noinline", False)
    return digest_of(type(function).__name__, is_inlined, tree_text(tree), *constants), called


def _class_text(aggregate: Any) -> str:
    """Write the definition of an aggregate, whose fields Triton does not keep where others can read them."""
    definitions, _ = _module(Path(sys.modules[aggregate.__module__].__file__ or ""))
    return " ".join(map(tree_text, definitions[aggregate.__qualname__]))


def value_text(value: Any) -> str:
    """Write a constant of a kernel as text; a device function by its code."""
    from triton.language.core import constexpr
    from triton.runtime.jit import JITCallable

    if isinstance(value, constexpr):
        return f"constexpr {value_text(value.value)}"
    if isinstance(value, JITCallable):
        return kernel_key(value)
    if isinstance(value, dict):
        return str(sorted((str(key), value_text(it)) for key, it in value.items()))
    if isinstance(value, list | tuple):
        return str([value_text(it) for it in value])
    return f"{type(value).__name__} {value}"


def compilation_key(
    function: Any, device: int, options: Any, arguments: tuple[Any, Any, Any]
) -> str:
    """Return a digest of all that one compilation depends on: code, types, constants, launch, target and compiler.

    Args:
        function: the kernel.
        device: index of the device for which it is compiled.
        options: of the launch, such as the number of warps.
        arguments: the kernel's signature, its constants, and what is known of its arguments.
    """
    import triton

    backend = function.device_caches[device][3]
    signature, constants, attributes = map(value_text, arguments)
    return digest_of(
        triton.__version__,
        backend.hash(),  # ptxas and the compute capability
        options.hash(),
        kernel_key(function),
        signature,
        constants,
        attributes,
    )
