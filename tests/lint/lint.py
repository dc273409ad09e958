"""Checks one rule over the tree: lint.py RULE --source DIR [what the rule needs]. Exit status: 0 clean, 1 problems, 77 cannot run here."""
import argparse
import shutil
import subprocess
import sys

import build_rules
import source_rules
from tree import Tree


def find_all(names):
    return [name for name in names if shutil.which(name)]


def clang_format_14():
    for name in ("clang-format-14", "clang-format"):
        if shutil.which(name):
            text = subprocess.run([name, "--version"], capture_output=True, text=True, check=True).stdout
            if " version 14." in text:
                return name
    return None


def run_layout(tree, _):
    tool = clang_format_14()
    if not tool:
        print("clang-format 14 was not found")
        sys.exit(77)
    return source_rules.layout(tree, tool)


def run_headers(tree, options):
    mpi_includes = options.mpi_includes.split(":") if options.mpi_includes else None
    c_compilers, cxx_compilers = find_all(["gcc", "clang"]), find_all(["g++", "clang++"])
    nvcc = shutil.which("nvcc")
    print("with", *c_compilers, *cxx_compilers, *(["nvcc"] if nvcc else []), "" if mpi_includes else "without MPI")
    if not c_compilers or not cxx_compilers:
        print("neither gcc and g++ nor clang and clang++ were found")
        sys.exit(77)
    return build_rules.headers(tree, c_compilers, cxx_compilers, nvcc, mpi_includes)


RULES = {
    "includes": lambda tree, _: source_rules.includes(tree),
    "calls": lambda tree, _: source_rules.calls(tree),
    "lengths": lambda tree, _: source_rules.lengths(tree),
    "words": lambda tree, _: source_rules.words(tree),
    "status": lambda tree, _: source_rules.status(tree),
    "version": lambda tree, _: source_rules.version(tree),
    "layout": run_layout,
    "headers": run_headers,
    "symbols": lambda tree, o: build_rules.symbols(tree, o.shared, o.static, o.nm, o.cc),
    "globals": lambda tree, o: build_rules.globals_(tree, o.static, o.objdump),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rule", choices=RULES)
    parser.add_argument("--source", required=True)
    parser.add_argument("--shared", help="the shared library")
    parser.add_argument("--static", help="the static library")
    parser.add_argument("--mpi-includes", help="include folders of MPI, ':' between them")
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--objdump", default="objdump")
    options = parser.parse_args()
    tree = Tree(options.source)
    problems = RULES[options.rule](tree, options)
    for problem in problems:
        print(f"{problem.path}:{problem.line}: {problem.text}")
    print(f"{options.rule}: {len(problems)} problem(s) in {len(tree.paths)} files")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
