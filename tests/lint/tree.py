"""The source tree as the rules see it."""
import re
from collections import namedtuple
from pathlib import Path

Problem = namedtuple("Problem", "path line text")

LIBRARY = ("include", "core", "gating", "a2a", "moe")
C_SUFFIXES = (".c", ".h", ".cu", ".cuh")

_COMMENT_OR_STRING = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.S)


def blank(text, strings):
    """`text` with its comments, and its string contents if asked, made spaces; every line keeps its number."""

    def replace(match):
        found = match.group()
        if found[0] in "\"'":
            return found[0] + " " * (len(found) - 2) + found[-1] if strings else found
        return re.sub(r"[^\n]", " ", found)

    return _COMMENT_OR_STRING.sub(replace, text)


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


class Tree:
    def __init__(self, root):
        self.root = Path(root).resolve()
        self.paths = sorted(self._walk(self.root))

    def _walk(self, folder):
        for entry in folder.iterdir():
            if entry.is_symlink() or entry.name == ".git":
                continue
            if entry.is_file():
                yield entry.relative_to(self.root).as_posix()
            elif not self._foreign(entry):
                yield from self._walk(entry)

    @staticmethod
    def _foreign(folder):
        """Build trees, virtual environments, caches and version control are not ours to check."""
        name = folder.name
        if (name.startswith(".") and name != ".ci") or name.startswith("build") or name == "__pycache__":
            return True
        return (folder / "CMakeCache.txt").exists() or (folder / "pyvenv.cfg").exists()

    def files(self, suffixes=None, folders=None):
        for path in self.paths:
            if suffixes and not path.endswith(tuple(suffixes)):
                continue
            if folders and not path.startswith(tuple(folder + "/" for folder in folders)):
                continue
            yield path

    def text(self, path):
        return (self.root / path).read_text(encoding="utf-8")

    def code(self, path, strings=True):
        """The text without comments and, unless told otherwise, without what strings say."""
        return blank(self.text(path), strings)

    def public_headers(self):
        return [path for path in self.files((".h",)) if path.startswith("include/pmoe/")]
