"""Each rule must be able to fail: it finds what is wrong in a bad tree, at its line, and nothing in a good one."""
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

import build_rules
import lint
import source_rules
from tree import Tree

TYPES = """#ifndef PMOE_TYPES_H
#define PMOE_TYPES_H
#include <stddef.h>
#define PMOE_API __attribute__((visibility("default")))
#define PMOE_VERSION_MAJOR 1
#define PMOE_VERSION_MINOR 2
#define PMOE_VERSION_PATCH 3
/* ERR_ARG: see below */
#define PMOE_STATUS_MAP(X) \\
  X(OK, 0, "success") \\
  X(ERR_ARG, -1, "bad")
#ifdef __cplusplus
extern "C" {
#endif
typedef int (*pmoe_callback)(void *user);
PMOE_API int pmoe_one(pmoe_callback f);
PMOE_API const char *
pmoe_two(void);
#ifdef __cplusplus
}
#endif
#endif
"""
ONE = '#include "core/one.h"\nint pmoe_one(pmoe_callback f) { return f != 0 && pmoei_one(); }\n'
ONE += 'const char *pmoe_two(void) { return ""; }\nint pmoei_one(void) { return 1; }\n'
GOOD = {
    "CMakeLists.txt": "# build\nproject(pmoe VERSION 1.2.3 LANGUAGES C)\n",
    ".clang-format": "BasedOnStyle: LLVM\n",
    "include/pmoe/types.h": TYPES,
    "core/one.h": '#include <pmoe/types.h>\nint pmoei_one(void);\n',
    "core/one.c": ONE,
    "gating/gate.c": '#include "core/one.h"\n#include <stdint.h>\n/* abort(); */ const char *const pmoei_text = "exit(";\n',
    "moe/layer.c": '#include "gating/gate.h"\n#include "a2a/plan.h"\n',
    "gating/gate.h": "",
    "a2a/plan.h": "#include <pthread.h>\n",
    "tests/support/rig.h": "",
    "tests/unit/test_one.c": '#include "core/one.h"\n#include "support/rig.h"\n',
    "examples/a.c": "#include <anything.h>\n#include <pmoe/types.h>\n",
}


class LintTest(unittest.TestCase):
    tested = set()

    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="pmoe-lint-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def tree(self, **changes):
        """The good tree with some files replaced; `core__one_c` stands for core/one.c."""
        files = GOOD | {self.path(name): text for name, text in changes.items()}
        for path, text in files.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_text(text, encoding="utf-8")
        return Tree(self.folder)

    @staticmethod
    def path(name):
        stem, suffix = name.rsplit("_", 1)
        return stem.replace("__", "/") + "." + suffix

    def check(self, rule, problems, *expected):
        """`expected`: (path, line, part of the text) of every problem there should be."""
        self.tested.add(rule)
        self.assertEqual(len(problems), len(expected), problems)
        for problem, (path, line, part) in zip(sorted(problems), sorted(expected)):
            self.assertEqual((problem.path, problem.line), (path, line), problem)
            self.assertIn(part, problem.text)

    def test_includes(self):
        self.check("includes", source_rules.includes(self.tree()))
        bad = {
            "core__one_c": '#include "gating/gate.h"\n#include <omp.h>\n#pragma omp simd\n',
            "core__one_h": '#include "../moe/layer.c"\n',
            "gating__gate_c": '\n#include "a2a/plan.h"\n#include "nowhere.h"\n#include MACRO\n',
            "a2a__plan_h": "#include <gating/gate.h>\n#include <mpi.h>\n#  include <pmoe/mpi.h>\n#include <cblas.h>\n",
            "include__pmoe__mpi_h": "#include <mpi.h>\n#include <unistd.h>\n",
            "include__pmoe__types_h": "#include <pmoe/none.h>\n#include <nccl.h>\n#include <vector>\n",
            "examples__a_c": '#include "../core/one.h"\n#include "core/one.h"\n',
            "tests__unit__test_one_c": '#include "rig.h"\n',
            "tools__b_cpp": '#include "core/one.h"\n#include "../examples/a.c"\n',
        }
        self.check(
            "includes",
            source_rules.includes(self.tree(**bad)),
            ("core/one.c", 1, "core may include core, include only"),
            ("core/one.c", 2, "only core/parallel.c may"),
            ("core/one.c", 3, "uses OpenMP"),
            ("core/one.h", 1, "includes moe/layer.c"),
            ("gating/gate.c", 2, "includes a2a/plan.h"),
            ("gating/gate.c", 3, "not in the tree"),
            ("gating/gate.c", 4, "MACRO"),
            ("a2a/plan.h", 1, "includes gating/gate.h"),
            ("a2a/plan.h", 2, "only a2a/transport_mpi.c, include/pmoe/mpi.h may"),
            ("a2a/plan.h", 3, "only a2a/transport_mpi.c may"),
            ("a2a/plan.h", 4, "only core/gemm_cblas.c may"),
            ("include/pmoe/mpi.h", 2, "no standard header"),
            ("include/pmoe/types.h", 1, "not in the tree"),
            ("include/pmoe/types.h", 2, "only a2a/transport_nccl.c, include/pmoe/nccl.h may"),
            ("include/pmoe/types.h", 3, "no standard header"),
            ("examples/a.c", 1, "examples sees include/pmoe only"),
            ("examples/a.c", 2, "examples sees include/pmoe only"),
            ("tests/unit/test_one.c", 1, "not in the tree"),
            ("tools/b.cpp", 1, "tools sees include/pmoe only"),
            ("tools/b.cpp", 2, "tools sees include/pmoe only"),
        )

    def test_calls(self):
        self.check("calls", source_rules.calls(self.tree(core__ctx_c="free(p);\n")))
        bad = 'x->abort(1);\n_Static_assert(1, "exit(");\nassert(x);\n  exit (1);\nfprintf(f, "");\nfree(p);\n'
        self.check(
            "calls",
            source_rules.calls(self.tree(moe__layer_c=bad)),
            ("moe/layer.c", 3, "assert"),
            ("moe/layer.c", 4, "never stops"),
            ("moe/layer.c", 5, "never prints"),
            ("moe/layer.c", 6, "memory"),
        )

    def test_lengths(self):
        notes = []
        body = "  x++;\n"
        long_function = "static int f(int a,\n             int b) {\n" + body * 118 + "}\n"
        ok = self.tree(core__one_c=long_function.replace(body, "", 1), gating__gate_c=body * 401)
        self.check("lengths", source_rules.lengths(ok, notes.append))
        self.assertEqual(len(notes), 2, notes)
        bad = self.tree(
            core__one_c="struct s {\n" + body * 130 + "};\n" + long_function,
            core__one_h="\n" * 301,
            gating__gate_c=body * 601,
            a2a__plan_c="/* Length: one table. */\n" + body * 601,
        )
        self.check(
            "lengths",
            source_rules.lengths(bad, notes.append),
            ("core/one.c", 133, "function f has 121 lines"),
            ("core/one.h", 1, "file has 301 lines"),
            ("gating/gate.c", 1, "file has 601 lines"),
        )

    def test_words(self):
        self.check("words", source_rules.words(self.tree(docs__a_md="see core/work/x and /usr/home/y\n")))
        lines = ["TO" + "DO", "/* FIX" + "ME */", "/ho" + "me/me/x", "see iss" + "ue #7", "<" * 7 + " HEAD", ".." + "/shared/a"]
        self.check(
            "words",
            source_rules.words(self.tree(docs__a_md="\n".join(lines) + "\n")),
            *(("docs/a.md", number, "has ") for number in range(1, len(lines) + 1)),
        )

    def test_status(self):
        self.check("status", source_rules.status(self.tree()))
        bad = TYPES.replace('X(ERR_ARG, -1, "bad")', 'X(ERR_ARG, 0, "success") \\\n  X(ERR_TEXT, -3, "") \\\n  X(ODD, 4)')
        bad = bad.replace("ERR_ARG: see", "ERR_NONE: see")
        self.check(
            "status",
            source_rules.status(self.tree(include__pmoe__types_h=bad)),
            ("include/pmoe/types.h", 8, "ERR_NONE is not in"),
            ("include/pmoe/types.h", 9, "not X(NAME"),
            ("include/pmoe/types.h", 11, "the value 0 is taken"),
            ("include/pmoe/types.h", 11, "the text success is taken"),
            ("include/pmoe/types.h", 11, "errors, and they alone"),
            ("include/pmoe/types.h", 12, "no text"),
        )

    def test_version(self):
        self.check("version", source_rules.version(self.tree()))
        bad = self.tree(CMakeLists_txt="#\nproject(pmoe VERSION 1.2.4 LANGUAGES C)\n")
        self.check("version", source_rules.version(bad), ("CMakeLists.txt", 2, "1.2.3"))

    @unittest.skipUnless(lint.clang_format_14(), "clang-format 14 was not found")
    def test_layout(self):
        good = {name: "int x;\n" for name in ("include__pmoe__types_h", "core__one_c", "moe__layer_c", "gating__gate_c")}
        tool = lint.clang_format_14()
        self.check("layout", source_rules.layout(self.tree(**good), tool))
        bad = self.tree(**good | {"core__one_c": "int x;\nint   y ;\n"})
        self.check("layout", source_rules.layout(bad, tool), ("core/one.c", 2, "clang-format"))

    @unittest.skipUnless(lint.find_all(["gcc"]) and lint.find_all(["g++"]), "gcc and g++ were not found")
    def test_headers(self):
        compilers = {"c_compilers": ["gcc"], "cxx_compilers": ["g++"]}
        self.check("headers", build_rules.headers(self.tree(include__pmoe__mpi_h="#include <mpi.h>\n"), **compilers))
        cases = {
            "pmoe_size_t pmoe_f(void);\n": [1, 1],  # not self-contained
            "#include <stddef.h>\nstruct a {\n  int x;\n};\n": [2, 2],  # no guard
            "#pragma once\n\nstatic inline char *pmoe_f(void *p) { return p; }\n": [3],  # C only
            "#pragma once\ntypedef struct pmoe_a {} pmoe_a;\n": [2],  # an extension of C
            "#pragma once\nvoid pmoe_f(int private, int class);\n": [2],  # words of C++
        }
        for text, lines in cases.items():
            problems = build_rules.headers(self.tree(include__pmoe__bad_h=text), **compilers)
            self.check("headers", problems, *(("include/pmoe/bad.h", line, "alone does not compile") for line in lines))
        (self.folder / "mpi").mkdir()
        (self.folder / "mpi/mpi.h").write_text("typedef int MPI_Comm;\n", encoding="utf-8")
        tree = self.tree(include__pmoe__bad_h="", include__pmoe__mpi_h="#include <mpi.h>\nMPI_Com pmoe_f(void);\n")
        problems = build_rules.headers(tree, **compilers, mpi_includes=[str(self.folder / "mpi")])
        self.check("headers", problems, *[("include/pmoe/mpi.h", 2, "MPI_Com")] * 2)

    def build(self, source, extra=""):
        tree = self.tree(core__one_c=source, **({"include__pmoe__types_h": TYPES + extra} if extra else {}))
        shared, static = self.folder / "libpmoe.so", self.folder / "libpmoe.a"
        include = ["-I", str(self.folder / "include"), "-I", str(self.folder)]
        for command in (
            ["gcc", "-fPIC", "-fvisibility=hidden", "-c", *include, str(self.folder / "core/one.c"), "-o", "one.c.o"],
            ["gcc", "-shared", "one.c.o", "-o", str(shared)],
            ["ar", "rcs", str(static), "one.c.o"],
        ):
            subprocess.run(command, cwd=self.folder, check=True)
        os.remove(self.folder / "one.c.o")
        return tree, shared, static

    @unittest.skipUnless(lint.find_all(["gcc"]), "gcc was not found")
    def test_symbols(self):
        self.check("symbols", build_rules.symbols(*self.build(ONE)))
        problems = build_rules.symbols(*self.build(ONE.replace("pmoe_two", "helper")))
        self.check(
            "symbols",
            problems,
            ("include/pmoe/types.h", 17, "pmoe_two is declared, but libpmoe.so does not export it"),
            ("libpmoe.a[one.c.o]", 0, "defines helper"),
        )
        extra = '#define OTHER 1\nint pmoe_unmarked(\n    int x);\nPMOE_API int other(void);\n'
        hidden = '\nPMOE_API int pmoe_three(void) { return 3; }\nint other(void) { return 4; }\n'
        problems = build_rules.symbols(*self.build(ONE + hidden, extra))
        last = TYPES.count("\n")
        self.check(
            "symbols",
            problems,
            ("include/pmoe/types.h", last + 1, "defines OTHER"),
            ("include/pmoe/types.h", last + 2, "pmoe_unmarked is declared without PMOE_API"),
            ("include/pmoe/types.h", last + 4, "a pmoe_* name was expected"),
            ("libpmoe.so", 0, "exports pmoe_three, which no header declares"),
            ("libpmoe.a[one.c.o]", 0, "defines pmoe_three"),
        )
        problems = build_rules.symbols(*self.build("int pmoei_missing(void);\n" + ONE.replace("return f", "return pmoei_missing() + f")))
        self.check("symbols", problems, ("libpmoe.so", 0, "does not link"))

    @unittest.skipUnless(lint.find_all(["gcc"]), "gcc was not found")
    def test_globals(self):
        fine = "static const char *const names[] = {\"a\"};\n_Thread_local int pmoei_per_thread;\n"
        fine += "const char *pmoei_name(void) { static const int one = 0; return names[one]; }\n"
        tree, _, static = self.build(ONE + fine)
        self.check("globals", build_rules.globals_(tree, static))
        bad = "int pmoei_counter;\nint pmoei_next(void) {\n  static int last = 7;\n  return pmoei_counter + last++;\n}\n"
        tree, _, static = self.build(bad)
        self.check(
            "globals",
            build_rules.globals_(tree, static),
            ("core/one.c", 1, "pmoei_counter is a global variable"),
            ("core/one.c", 3, "last is a global variable"),
        )

    @classmethod
    def tearDownClass(cls):
        untested = set(lint.RULES) - cls.tested
        if not lint.clang_format_14():
            untested.discard("layout")
        assert not untested, f"no test shows that these rules can fail: {untested}"


if __name__ == "__main__":
    unittest.main()
