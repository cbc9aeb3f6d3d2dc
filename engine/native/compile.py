"""Compile the CPU kernels: `python -m engine.native.compile`, also run by the build hook.

Standard library only. One shared library per instruction set, next to the sources; the loader
(`engine/kernels.py`) picks one at run time, so a wheel built here runs on any machine of the same
operating system and architecture.
"""

from __future__ import annotations

import logging
import platform
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=default", "-Wall", "-Wextra")
_X86_LEVELS = ("x86-64-v3", "x86-64-v4")

_log = logging.getLogger(__name__)


def library_path(folder: Path, isa: str) -> Path:
    """The library for an instruction set: "generic", "x86-64-v3", "x86-64-v4".

    Its name carries a digest of the sources in `folder`, so that a library of other sources, whose
    functions may take other arguments, is not found and never called.
    """
    digest = sha256()
    for source in sorted([*folder.glob("*.c"), *folder.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return folder / f"libhalfmoon-{digest.hexdigest()[:12]}-{isa}.so"


def targets(machine: str) -> dict[str, tuple[str, ...]]:
    """Instruction sets to build for a `platform.machine()`, with the compiler flags of each."""
    levels = _X86_LEVELS if machine in ("x86_64", "AMD64") else ()
    return {"generic": (), **{level: (f"-march={level}",) for level in levels}}


def compile_libraries(folder: Path) -> list[Path]:
    """Compile every library that this machine's compiler can make into `folder`.

    Returns the files made; none, with a warning that says the fix, when there is no C compiler.
    A failing instruction set is left out, because the loader falls back to a lesser one.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        _log.warning("no C compiler (cc, gcc, clang): install one to get the fast CPU kernels")
        return []
    for stale in folder.glob("libhalfmoon-*.so"):
        stale.unlink()
    made = []
    for isa, flags in targets(platform.machine()).items():
        path = library_path(folder, isa)
        if _compile(compiler, folder, path, flags):
            made.append(path)
    return made


def _compile(compiler: str, folder: Path, path: Path, flags: tuple[str, ...]) -> bool:
    """Compile one library, without OpenMP (one thread) where the compiler lacks it."""
    sources = [str(source) for source in sorted(folder.glob("*.c"))]
    partial = path.with_suffix(".partial")
    detail = ""
    for openmp in (("-fopenmp",), ()):
        command = [compiler, *_FLAGS, *flags, *openmp, "-o", str(partial), *sources, "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            partial.replace(path)  # whole or not at all, also for a process loading it now
            return True
        detail = done.stderr.strip()[-2000:]
    _log.warning("could not compile %s: %s", path.name, detail)
    return False


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    libraries = compile_libraries(Path(__file__).parent)
    _log.info("compiled %s", ", ".join(path.name for path in libraries) or "nothing")
    sys.exit(0 if libraries else 1)
