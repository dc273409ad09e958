"""Rules that read the sources. Each takes a Tree and returns Problems."""
import posixpath
import re
import subprocess

from tree import C_SUFFIXES, LIBRARY, Problem, line_of

# Who may include whom. Whoever is not named here (the tests) sees everything.
LAYERS = {
    "include": {"include"},
    "core": {"include", "core"},
    "gating": {"include", "core", "gating"},
    "a2a": {"include", "core", "a2a"},
    "moe": {"include", "core", "gating", "a2a", "moe"},
}
OUTSIDE = ("examples", "tools", "python", "tests/api", "tests/install", "tests/oracle")

C_STANDARD = set(
    "assert complex ctype errno fenv float inttypes iso646 limits locale math setjmp signal stdalign stdarg stdatomic "
    "stdbool stddef stdint stdio stdlib stdnoreturn string tgmath threads time uchar wchar wctype".split()
)
POSIX = set("dirent dlfcn fcntl poll pthread sched semaphore strings sys/mman sys/stat sys/time sys/types unistd".split())
INTRINSICS = {"immintrin", "arm_neon", "cpuid"}

# Headers of other software, and the files of the library that may include them.
VENDOR = (
    (r"omp\.h", {"core/parallel.c"}),
    (r"(oneapi/dnnl/)?dnnl\w*\.h", {"core/gemm_onednn.c"}),
    (r"(cblas|openblas_config)\.h", {"core/gemm_cblas.c"}),
    (r"mpi\.h", {"include/pmoe/mpi.h", "a2a/transport_mpi.c"}),
    (r"pmoe/mpi\.h", {"a2a/transport_mpi.c"}),
    (r"(cuda_runtime_api|cublas_v2)\.h", {"core/cuda.h"}),
    (r"(cuda_runtime|cuda_bf16|cuda_fp16)\.h|cub/.*", {"*.cu", "*.cuh"}),
    (r"nccl\.h", {"include/pmoe/nccl.h", "a2a/transport_nccl.c"}),
    (r"pmoe/nccl\.h", {"a2a/transport_nccl.c"}),
)
OPENMP_IN = {"core/parallel.c"}

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|(\S.*))', re.M)
OPENMP = re.compile(r"#[ \t]*pragma[ \t]+omp\b|\bomp_\w+[ \t]*\(")


def _outside(path):
    return next((folder for folder in OUTSIDE if path.startswith(folder + "/")), None)


def _ours(tree, path, name):
    """The file of this tree that the directive means, or None."""
    places = [posixpath.join(posixpath.dirname(path), name), name, "include/" + name]
    if path.startswith("tests/"):
        places.append("tests/" + name)
    return next((place for place in map(posixpath.normpath, places) if (tree.root / place).is_file()), None)


def _is_one_of(path, names):
    """Whether the path is among the names; "*.cu" is every file that ends so."""
    return any(path == name or (name.startswith("*") and path.endswith(name[1:])) for name in names)


def _include_problem(tree, path, quoted, angled, computed):
    if computed:
        return f"includes {computed}; a name in quotes or angle brackets was expected"
    name = quoted or angled
    layer = path.split("/")[0]
    outside = _outside(path)
    target = _ours(tree, path, name)
    if target:
        if outside:
            if not target.startswith(("include/", outside + "/")):
                return f"includes {target}; {outside} sees include/pmoe only"
        elif layer in LAYERS and target.split("/")[0] not in LAYERS[layer]:
            return f"includes {target}; {layer} may include {', '.join(sorted(LAYERS[layer]))} only"
    elif quoted or name.startswith("pmoe/"):
        return f"includes {name}, which is not in the tree"
    if layer not in LIBRARY:
        return None
    for pattern, allowed in VENDOR:
        if re.fullmatch(pattern, name):
            return None if _is_one_of(path, allowed) else f"includes {name}; only {', '.join(sorted(allowed))} may"
    if not target:
        known = C_STANDARD if layer == "include" else C_STANDARD | POSIX | INTRINSICS
        if not name.endswith(".h") or name[:-2] not in known:
            return f"includes {name}, which is no standard header"
    return None


def includes(tree):
    """include <- core <- {gating, a2a} <- moe; what is outside sees include/pmoe; vendor headers where they belong."""
    problems = []
    for path in tree.files(C_SUFFIXES + (".cpp", ".cc")):
        text = tree.code(path, strings=False)
        for match in INCLUDE.finditer(text):
            problem = _include_problem(tree, path, *match.groups())
            if problem:
                problems.append(Problem(path, line_of(text, match.start()), problem))
        if path.split("/")[0] in LIBRARY and path not in OPENMP_IN:
            for match in OPENMP.finditer(text):
                where = ", ".join(sorted(OPENMP_IN))
                problems.append(Problem(path, line_of(text, match.start()), f"uses OpenMP; only {where} may"))
    return problems


STOPS = "abort exit _exit _Exit quick_exit assert".split()
PRINTS = "printf vprintf fprintf vfprintf dprintf puts fputs putchar putc fputc perror".split()
ALLOCATES = "malloc calloc realloc free aligned_alloc posix_memalign strdup".split()
# The context's own default allocator; the hub, which lives before any context does; what MPI may write to after a time-out.
ALLOCATE_IN = {"core/ctx.c", "a2a/transport_threads.c", "a2a/transport_mpi.c"}


def calls(tree):
    """The library never stops the process, never prints, and takes memory from the host's allocator."""
    reasons = {name: "the library never stops the process" for name in STOPS}
    reasons.update({name: "the library never prints" for name in PRINTS})
    reasons.update({name: "memory comes from pmoei_alloc or scratch" for name in ALLOCATES})
    pattern = re.compile(r"(?<![\w.>])(" + "|".join(reasons) + r")[ \t]*\(")
    problems = []
    for path in tree.files(C_SUFFIXES, LIBRARY):
        text = tree.code(path)
        for match in pattern.finditer(text):
            name = match.group(1)
            if name not in ALLOCATES or path not in ALLOCATE_IN:
                problems.append(Problem(path, line_of(text, match.start()), f"calls {name}; {reasons[name]}"))
    return problems


# suffix: (lines to aim at, lines at most)
FILE_LINES = {".c": (400, 600), ".cu": (500, 600), ".h": (250, 300), ".py": (400, 600)}
FUNCTION_LINES = (60, 120)
EXCUSE = re.compile(r"(?:/\*|//|#)\s*Length: \w+")


def functions(code):
    """(name, first line, number of lines) of each function of a formatted C file: it opens and closes in column 0."""
    found, head, first, inside = [], "", 0, False
    for number, line in enumerate(code.split("\n"), 1):
        line = line.rstrip()
        if inside:
            if line.startswith("}"):
                found.append((re.search(r"(?!__attribute__)\b(\w+)\s*\(", head).group(1), first, number - first + 1))
                head, inside = "", False
            continue
        if not head:
            if not re.match(r"[A-Za-z_]", line):
                continue
            first = number
        head += line
        if line.endswith("{"):
            inside = bool(re.search(r"\)\s*{$", head))
        if not inside and line.endswith(("{", "}", ";")):
            head = ""
    return found


def lengths(tree, report=print):
    """Reports long files and functions; refuses very long ones unless the file says why (a comment `Length: reason`)."""
    problems = []
    for path in tree.files(tuple(FILE_LINES)):
        text = tree.text(path)
        suffix = "." + path.rsplit(".", 1)[1]
        found = [(1, text.count("\n"), *FILE_LINES[suffix], "file")]
        if suffix != ".py":
            found += [(line, count, *FUNCTION_LINES, f"function {name}") for name, line, count in functions(tree.code(path))]
        excused = EXCUSE.search(text)
        for line, count, aim, most, what in found:
            if count > most and not excused:
                why = f"{what} has {count} lines; at most {most}, or a comment `Length: <reason>`, was expected"
                problems.append(Problem(path, line, why))
            elif count > aim:
                report(f"note: {path}:{line}: {what} has {count} lines; aim at {aim}")
    return problems


# Written in pieces, so that this file passes its own rule.
WORDS = (
    (re.compile(r"\b(TO" r"DO|FIX" r"ME|X{3}|HA" r"CK)\b"), "unfinished work"),
    (re.compile(r"(?<![\w.])/(home|root|Users|work|mnt|scratch)/\w"), "a path of somebody's machine"),
    (re.compile(r"\.\./" r"shared\b"), "a path outside the repository"),
    (re.compile(r"\bissue\s+#?\d{1,2}\b", re.I), "an issue number"),  # longer ones cite other projects
    (re.compile(r"^(<{7}|>{7}) ", re.M), "a merge conflict"),
)


def words(tree):
    """No unfinished work, no machine's paths, no numbers of issues."""
    problems = []
    for path in tree.files():
        try:
            text = tree.text(path)
        except UnicodeDecodeError:
            continue
        for pattern, what in WORDS:
            for match in pattern.finditer(text):
                problems.append(Problem(path, line_of(text, match.start()), f"has {what}: {match.group().strip()}"))
    return problems


STATUS_ENTRY = re.compile(r'X\((\w+), *(-?\d+), *"([^"]*)"\)')


def status(tree):
    """PMOE_STATUS_MAP gives each status one value and one text, and headers mention no status that is not in it."""
    path = "include/pmoe/types.h"
    text = tree.text(path)
    problems, names, values, texts = [], set(), set(), set()

    def complain(offset, why):
        problems.append(Problem(path, line_of(text, offset), why))

    begin = text.find("#define PMOE_STATUS_MAP(X)")
    if begin < 0:
        return [Problem(path, 1, "has no PMOE_STATUS_MAP(X)")]
    body = re.match(r"(?:[^\n]*\\\n)*[^\n]*", text[begin:]).group()
    entries = list(STATUS_ENTRY.finditer(body))
    if len(entries) != len(re.findall(r"\bX\(", body)):
        complain(begin, "PMOE_STATUS_MAP has an entry that is not X(NAME, value, \"text\")")
    for entry in entries:
        name, value, what = entry.group(1), int(entry.group(2)), entry.group(3)
        at = begin + entry.start()
        if not what:
            complain(at, f"{name} has no text")
        for kind, item, seen in (("name", name, names), ("value", value, values), ("text", what, texts)):
            if item in seen:
                complain(at, f"{name}: the {kind} {item} is taken")
            seen.add(item)
        if name.startswith("ERR_") != (value < 0):
            complain(at, f"{name} is {value}; errors, and they alone, are negative")
    for header in tree.public_headers():
        for match in re.finditer(r"\b(?:PMOE_)?(ERR_[A-Z]+)\b", tree.text(header)):
            if match.group(1) not in names:
                where = line_of(tree.text(header), match.start())
                problems.append(Problem(header, where, f"{match.group(1)} is not in PMOE_STATUS_MAP"))
    return problems


def version(tree):
    """The build and the headers agree on the version."""
    text = tree.text("include/pmoe/types.h")
    header = ".".join(re.search(rf"#define PMOE_VERSION_{part} (\d+)", text).group(1) for part in ("MAJOR", "MINOR", "PATCH"))
    build = tree.text("CMakeLists.txt")
    match = re.search(r"project\(pmoe VERSION ([\d.]+)", build)
    if match and match.group(1) == header:
        return []
    return [Problem("CMakeLists.txt", line_of(build, match.start()) if match else 1, f"types.h has version {header}")]


def layout(tree, clang_format):
    """clang-format would change nothing."""
    paths = list(tree.files(C_SUFFIXES))
    run = subprocess.run([clang_format, "--dry-run", *paths], cwd=tree.root, capture_output=True, text=True, check=False)
    seen = {}
    for match in re.finditer(r"^(?:\./)?([^:\n]+):(\d+):\d+: (?:warning|error): (.*)", run.stderr, re.M):
        seen.setdefault((match.group(1), int(match.group(2))), "is not formatted; run clang-format -i (version 14)")
    if run.returncode != 0 and not seen:
        return [Problem(".clang-format", 1, f"clang-format failed: {run.stderr.strip()}")]
    return [Problem(path, line, why) for (path, line), why in seen.items()]
