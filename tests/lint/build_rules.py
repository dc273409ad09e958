"""Rules that compile the headers or read what was built."""
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tree import LIBRARY, Problem, line_of

WARNINGS = ["-Wall", "-Wextra", "-Werror", "-pedantic-errors", "-Wconversion", "-Wno-sign-conversion", "-Wshadow"]


def _run(*command):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def _compilations(c_compilers, cxx_compilers, nvcc):
    """(name, suffix, command) for each way in which a header must compile."""
    for compiler in c_compilers:
        yield f"{compiler} as C11", ".c", [compiler, "-std=c11", "-fsyntax-only", "-Wstrict-prototypes", *WARNINGS]
    for compiler in cxx_compilers:
        yield f"{compiler} as C++17", ".cpp", [compiler, "-std=c++17", "-fsyntax-only", *WARNINGS]
    if nvcc:
        yield "nvcc", ".cu", [nvcc, "-std=c++17", "-c", "-o", "/dev/null"]


def headers(tree, c_compilers, cxx_compilers, nvcc=None, mpi_includes=None):
    """Each public header compiles alone, and twice in a row. mpi.h is left out where MPI is."""
    with tempfile.TemporaryDirectory() as folder:

        def check(job):
            header, (name, suffix, command) = job
            source = Path(folder, Path(header).stem + suffix)
            system = [part for path in mpi_includes or [] for part in ("-isystem", path)]
            run = _run(*command, "-I", tree.root / "include", *(system if header.endswith("/mpi.h") else []), source)
            if run.returncode == 0:
                return []
            at = re.search(re.escape(f"{tree.root}/") + r"([^:(\s]+)[:(](\d+)", run.stderr)
            where = (at.group(1), int(at.group(2))) if at else (header, 1)
            return [Problem(*where, f"{Path(header).name} alone does not compile with {name}:\n{run.stderr.strip()}")]

        ways = list(_compilations(c_compilers, cxx_compilers, nvcc))
        jobs = [(header, way) for header in tree.public_headers() for way in ways]
        if mpi_includes is None:
            jobs = [job for job in jobs if not job[0].endswith("/mpi.h")]
        for header, (_, suffix, _) in jobs:
            name = header.removeprefix("include/")
            text = f"#include <{name}>\n#include <{name}>\ntypedef int lint_not_empty;\n"
            Path(folder, Path(header).stem + suffix).write_text(text, encoding="utf-8")
        with ThreadPoolExecutor(2) as pool:
            return [problem for problems in pool.map(check, jobs) for problem in problems]


def declared(tree):
    """{name: (header, line)} of the functions marked PMOE_API, and Problems about those that are not."""
    names, problems = {}, []
    for path in tree.public_headers():
        code = tree.code(path)
        for match in re.finditer(r"^PMOE_API\b[^;{]*?\b(\w+)[ \n]*\(", code, re.M):
            names[match.group(1)] = (path, line_of(code, match.start()))
        for match in re.finditer(r"^(?!PMOE_API\b|static\b|typedef\b|#)[A-Za-z_][^;{}()#]*?\b(\w+)[ \n]*\([^;{}]*\);", code, re.M):
            problems.append(Problem(path, line_of(code, match.start()), f"{match.group(1)} is declared without PMOE_API"))
        for match in re.finditer(r"^[ \t]*#[ \t]*define[ \t]+(?!PMOE_)(\w+)", code, re.M):
            problems.append(Problem(path, line_of(code, match.start()), f"defines {match.group(1)}; PMOE_* was expected"))
    return names, problems


def _symbols(nm, library, *flags):
    """(object, symbol) of what the library defines for others."""
    run = _run(nm, *flags, "--defined-only", "--format=posix", library)
    if run.returncode != 0:
        raise RuntimeError(run.stderr)
    owner = Path(library).name
    for line in run.stdout.splitlines():
        fields = line.split()
        if len(fields) == 1:
            owner = Path(library).name + fields[0][fields[0].index("[") :].rstrip(":")
        elif fields[1] != "A":
            yield owner, fields[0].split("@")[0]


def symbols(tree, shared, static, nm="nm", cc="cc"):
    """The shared library exports what include/pmoe declares, no less and no more; names inside are pmoei_*."""
    names, problems = declared(tree)
    exported = {symbol for _, symbol in _symbols(nm, shared, "-D")}
    for name, (path, line) in sorted(names.items()):
        if not name.startswith("pmoe_"):
            problems.append(Problem(path, line, f"declares {name}; a pmoe_* name was expected"))
        if name not in exported:
            problems.append(Problem(path, line, f"{name} is declared, but {Path(shared).name} does not export it"))
    for name in sorted(exported - set(names)):
        problems.append(Problem(Path(shared).name, 0, f"exports {name}, which no header declares"))
    for owner, symbol in _symbols(nm, static, "-g"):
        name = symbol.split(".")[0]  # clones for other instruction sets are name.avx2 and the like
        if "." not in symbol and name not in names and not name.startswith("pmoei_"):
            problems.append(Problem(owner, 0, f"defines {symbol}; static, pmoei_* or a declared pmoe_* was expected"))
    return problems or _link(names, shared, cc)


def _link(names, shared, cc):
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "link.c")
        lines = [f"extern void {name}(void);" for name in sorted(names)]
        lines += ["void (*const all[])(void) = {", *(f"    {name}," for name in sorted(names)), "};"]
        lines += ["int main(void) { return all[0] == 0; }", ""]
        source.write_text("\n".join(lines), encoding="utf-8")
        program = Path(folder, "link")
        run = _run(cc, "-w", "-o", program, source, shared, f"-Wl,-rpath,{Path(shared).parent}")
        if run.returncode == 0:
            run = _run(program)
        return [] if run.returncode == 0 else [Problem(Path(shared).name, 0, f"does not link: {run.stderr.strip()}")]


def globals_(tree, static, objdump="objdump"):
    """No variable outlives a call unless an object of the caller's holds it: contexts share nothing."""
    run = _run(objdump, "-t", static)
    if run.returncode != 0:
        raise RuntimeError(run.stderr)
    problems, owner = [], ""
    for line in run.stdout.splitlines():
        if ":     file format" in line:
            owner = line.split(":")[0]
        match = re.search(r" O (\.data|\.bss|\*COM\*)(?!\.rel\.ro)[.\w]*\s+[0-9a-f]+\s+(?:\.hidden )?(\S+)$", line)
        if match:
            path = next((p for p in tree.files((".c", ".cu"), LIBRARY) if p.endswith("/" + owner.removesuffix(".o"))), owner)
            name = match.group(2).split(".")[0]
            found = re.search(rf"\b{name}\b", tree.code(path)) if path != owner else None
            line_number = line_of(tree.code(path), found.start()) if found else 0
            problems.append(Problem(path, line_number, f"{name} is a global variable; the library has no global state"))
    return problems
