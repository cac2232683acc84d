#!/usr/bin/env python3
"""Fails if more than two files, or more than two modules of a crate's root, import each other in a circle.

An import is a `use` of, or an inline path through, `crate::`, `super::` or `self::`, outside of test code. It leads
to the file that defines the name: re-exports are followed. Imports between a module and a module inside it do not
count, since a parent declares and re-exports its children. For the modules of a crate's root, each module counts as
one with everything inside it.
"""

import re
import sys
from pathlib import Path

MOST = 2
NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|r(#*)".*?"\1|b?"(?:\\.|[^"\\])*"|b?\'(?:\\.[^\']*|[^\'\\])\'', re.S)
TEST_ITEM = re.compile(r"#\[cfg\((?:test|all\(test\b[^\]]*)\)\]\s*(?:#\[[^\]]*\]\s*)*(?:pub(?:\([^)]*\))?\s+)?[^;{]*")
MODULE = re.compile(r"\bmod\s+(\w+)\s*;")
USE = re.compile(r"\buse\s+([^;]+);")
INLINE = re.compile(r"(?<![\w:])(?:crate|super|self)(?:::\w+)+")


def without_tests(code):
    """Removes the items that exist in tests only."""
    while found := TEST_ITEM.search(code):
        end = found.end()
        if end < len(code) and code[end] == "{":
            depth = 1
            while depth and end + 1 < len(code):
                end += 1
                depth += {"{": 1, "}": -1}.get(code[end], 0)
        code = code[: found.start()] + code[end + 1 :]
    return code


def expand(tree):
    """The paths of a `use`, each with the name that it gives."""
    tree = tree.strip()
    if "{" not in tree:
        path, _, alias = tree.partition(" as ")
        names = [name.strip() for name in path.split("::")]
        if names[-1] == "self":
            names.pop()
        return [(names, alias.strip() or names[-1])] if names else []
    head, _, rest = tree.partition("{")
    parts, depth, start = [], 0, 0
    rest = rest[: rest.rindex("}")]
    for at, letter in enumerate(rest + ","):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append(rest[start:at])
            start = at + 1
    return [found for part in parts if part.strip() for found in expand(head + part.strip())]


class Crate:
    """The modules of a crate: for each its file, and its `use`s by the names that they give."""

    def __init__(self, root):
        self.files, self.uses, self.inline = {}, {}, {}
        self.add((), root)

    def add(self, module, file):
        code = without_tests(NOISE.sub("", file.read_text()))
        self.files[module] = file
        self.uses[module] = [found for tree in USE.findall(code) for found in expand(tree)]
        self.inline[module] = [path.split("::") for path in INLINE.findall(USE.sub("", code))]
        inside = file.parent if file.name in ("lib.rs", "mod.rs") else file.with_suffix("")
        for name in MODULE.findall(code):
            children = (inside / f"{name}.rs", inside / name / "mod.rs")
            child = next((path for path in children if path.exists()), None)
            if child:
                self.add((*module, name), child)

    def resolve(self, module, path, depth=0):
        """The module that defines what a path in `module` names; none where that is another crate's."""
        first, *rest = path
        if first == "crate":
            at = ()
        elif first == "self":
            at = module
        elif first == "super":
            at = module[:-1]
        elif (*module, first) in self.files:
            at, rest = module, path
        else:
            return None
        for name in rest:
            if name == "super":
                at = at[:-1]
            elif (*at, name) in self.files:
                at = (*at, name)
            else:
                if depth < 8:
                    for names, given in self.uses[at]:
                        if given == name and names != path:
                            return self.resolve(at, names, depth + 1)
                return at
        return at

    def imports(self):
        """Pairs of modules: the first imports something that the second defines."""
        for module in self.files:
            paths = [names for names, _ in self.uses[module]] + self.inline[module]
            for path in paths:
                target = self.resolve(module, path)
                shorter = min(len(module), len(target)) if target is not None else 0
                if target is not None and module[:shorter] != target[:shorter]:
                    yield module, target


def circles(edges):
    """The largest sets of nodes that all lead to each other, if they have more than MOST nodes."""

    def reachable(start):
        found, waiting = set(), [start]
        while waiting:
            new = edges.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    reach = {node: reachable(node) for node in edges}
    found = {frozenset(other for other in reach[node] if node in reach.get(other, ())) for node in edges}
    return sorted(sorted(circle) for circle in found if len(circle) > MOST)


def main():
    home = Path(__file__).resolve().parent.parent
    members = re.search(r"members\s*=\s*\[(.*?)\]", (home / "Cargo.toml").read_text(), re.S)[1]
    failed = False
    for name in re.findall(r'"([^"]+)"', members):
        crate = Crate(home / name / "src" / "lib.rs")
        files, units = {}, {}
        for module, target in crate.imports():
            files.setdefault(module, set()).add(target)
            if module[:1] != target[:1]:
                units.setdefault(module[:1], set()).add(target[:1])
        for what, edges in (("files", files), ("modules", units)):
            for circle in circles(edges):
                failed = True
                print(f"{name}: {len(circle)} {what} import each other in a circle:", file=sys.stderr)
                for module in circle:
                    others = ", ".join("::".join(other) for other in circle if other in edges[module])
                    print(f"  {crate.files[module].relative_to(home)} imports {others}", file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
