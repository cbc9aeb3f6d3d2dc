"""Build hook: compiles the CPU kernels into `engine/native/` for wheels and editable installs.

Without a C compiler the install still works, with a warning; the engine then runs on torch alone.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelBuildHook(BuildHookInterface[Any]):
    """Compiles the libraries, and marks the wheel with this platform when there are any."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files are collected; `artifacts` in pyproject.toml takes them in."""
        if self.target_name != "wheel":
            return
        folder = Path(self.root) / "engine" / "native"
        if _load(folder / "compile.py").compile_libraries(folder):
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"


def _load(path: Path) -> ModuleType:
    """Import the compile script by its path: the package is not importable while it is built."""
    spec = importlib.util.spec_from_file_location("halfmoon_compile", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
