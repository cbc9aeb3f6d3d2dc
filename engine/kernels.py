"""The compiled CPU kernels: choosing a library, loading it, and typed calls into it.

The libraries are plain C with OpenMP. torch is imported first on purpose: the libraries then bind
to the OpenMP runtime that torch has loaded, so that one pool of threads serves both and they never
fight. Start worker processes with `OMP_WAIT_POLICY=PASSIVE`, so that idle threads sleep.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import torch

from core.errors import ConfigError
from engine.native.compile import library_path

PANEL = 16
"""Columns of a packed panel; `PANEL` in native/vec.h."""

LIBRARY_FOLDER = Path(__file__).parent / "native"

_FIX = "install a C compiler and run `python -m engine.native.compile` (or `pip install -e .`)"
_log = logging.getLogger(__name__)


class AttentionCall(ctypes.Structure):
    """Arguments of `hm_attention`; mirrors `attention_call` in native/attention.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "cache")),
        *(
            (name, ctypes.c_void_p)
            for name in ("query_start", "position_start", "table_start", "block_table")
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                "q_token_stride",
                "q_head_stride",
                "k_token_stride",
                "k_head_stride",
                "v_token_stride",
                "v_head_stride",
                "block_stride",
            )
        ),
        *(
            (name, ctypes.c_int32)
            for name in (
                "num_sequences",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "block_size",
                "window",
                "num_threads",
            )
        ),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class LinearWeights(ctypes.Structure):
    """A packed weight [n, k] and a bias or none; `linear_weights` in native/layer.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "bias")),
        *((name, ctypes.c_int64) for name in ("n", "k")),
    )


class NormWeights(ctypes.Structure):
    """An RMS norm, or without a weight none; `norm_weights` in native/layer.c."""

    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float))


class LayerWeights(ctypes.Structure):
    """A whole decoder layer; `layer_weights` in native/layer.c."""

    _fields_ = (
        *((name, LinearWeights) for name in ("qkv", "out", "gate_up", "down")),
        *((name, NormWeights) for name in ("input_norm", "q_norm", "k_norm", "mlp_norm")),
    )

    @property
    def scratch_floats(self) -> int:
        """Scratch memory that a row needs on its way through the layer."""
        qkv, out, gate_up, down = self.qkv, self.out, self.gate_up, self.down
        return int(qkv.k + qkv.n + out.k + gate_up.n + down.k)


class Kernels:
    """One loaded library. Calls release the interpreter lock and use up to `num_threads`."""

    def __init__(self, isa: str, path: Path, num_threads: int) -> None:
        self.isa = isa
        self.num_threads = num_threads
        library = ctypes.CDLL(str(path))
        pointer, int64 = ctypes.c_void_p, ctypes.c_int64
        self._linear = library.hm_linear
        self._linear.argtypes = (
            *(pointer, int64, int64, int64, pointer),
            *(int64, pointer, pointer, ctypes.c_int),
        )
        self._linear.restype = None
        self._pack = library.hm_pack
        self._pack.argtypes = (pointer, int64, int64, pointer)
        self._pack.restype = None
        self._rms_norm = library.hm_rms_norm
        self._rms_norm.argtypes = (
            *(pointer, int64, int64, pointer, ctypes.c_float),
            *(pointer, ctypes.c_int),
        )
        self._rms_norm.restype = None
        self._silu_mul = library.hm_silu_mul
        self._silu_mul.argtypes = (pointer, int64, int64, pointer, ctypes.c_int)
        self._silu_mul.restype = None
        self._attention = library.hm_attention
        self._attention.argtypes = (ctypes.POINTER(AttentionCall),)
        self._layer = library.hm_layer
        self._layer.argtypes = (
            *(ctypes.POINTER(LayerWeights), ctypes.POINTER(AttentionCall), int64),
            *(pointer, pointer, pointer, pointer, pointer),
        )

    def pack(self, weight: torch.Tensor, packed: torch.Tensor) -> None:
        """Write float32 `weight` [n, k] into `packed` (`packed_floats(n, k)` long) as panels."""
        n, k = weight.shape
        weight = weight.contiguous()
        self._pack(weight.data_ptr(), n, k, packed.data_ptr())

    def linear(
        self, x: torch.Tensor, packed: torch.Tensor, n: int, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return x W^T + bias, [rows, n], for float32 `x` [rows, k] and a packed W [n, k].

        A row's result is the same bits whatever the other rows and their number.
        """
        rows, k = x.shape
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(rows, n)
        self._linear(
            x.data_ptr(),
            x.stride(0),
            rows,
            k,
            packed.data_ptr(),
            n,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            self.num_threads,
        )
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension; all contiguous."""
        out = torch.empty_like(x)
        dim = weight.shape[0]
        self._rms_norm(
            x.data_ptr(),
            x.numel() // dim,
            dim,
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            self.num_threads,
        )
        return out

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up, `[..., n]`, for contiguous `x` `[..., 2 n]`: gate, then up."""
        n = x.shape[-1] // 2
        out = torch.empty(*x.shape[:-1], n)
        self._silu_mul(x.data_ptr(), out.numel() // n, n, out.data_ptr(), self.num_threads)
        return out

    def attention(self, call: AttentionCall) -> None:
        """Write the step's K and V and attend; `call` names all memory and must stay valid."""
        if self._attention(ctypes.byref(call)) != 0:
            raise MemoryError("no memory for the scratch space of the attention kernel")

    def layer(
        self,
        weights: LayerWeights,
        call: AttentionCall,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        scratch: torch.Tensor,
    ) -> torch.Tensor:
        """Run a decoder layer over `x` [rows, hidden]; `rotation` is cos and sin [rows, head_dim].

        All contiguous; `scratch` holds `rows * weights.scratch_floats`. Of `call`, the pointers to
        and the strides of q, k, v and out are filled in.
        """
        y = torch.empty_like(x)
        cos, sin = rotation
        failed = self._layer(
            ctypes.byref(weights),
            ctypes.byref(call),
            len(x),
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            scratch.data_ptr(),
            y.data_ptr(),
        )
        if failed:
            raise MemoryError("no memory for the scratch space of the attention kernel")
        return y


def packed_floats(n: int, k: int) -> int:
    """Floats that a packed weight [n, k] takes: whole panels of `PANEL` columns."""
    return -(-n // PANEL) * PANEL * k


def load_kernels(
    isa: str = "auto", *, num_threads: int = 1, folder: Path = LIBRARY_FOLDER
) -> Kernels | None:
    """Load the library for `isa`, or the best one that this machine runs for "auto".

    "none" gives None (pure torch). So does "auto" when no library of these sources is there,
    with a warning that says how to get one. A named library that is missing or too new for this
    machine is refused.
    """
    if isa == "none":
        return None
    runnable = _runnable_isas(folder)
    if isa == "auto":
        if not runnable:
            _log.warning(
                "no compiled kernels, or only of other sources: running slower torch code; %s",
                _FIX,
            )
            return None
        isa = runnable[0]
    elif isa not in runnable:
        have = ", ".join(runnable) or "nothing"
        raise ConfigError(f"no kernels for {isa!r} here (this machine can use {have}); {_FIX}")
    return Kernels(isa, library_path(folder, isa), num_threads)


def _runnable_isas(folder: Path) -> list[str]:
    """Instruction sets that are compiled and that this machine has, the best first."""
    generic = library_path(folder, "generic")
    if not generic.exists():
        return []
    level = int(ctypes.CDLL(str(generic)).hm_cpu_level())
    names = [f"x86-64-v{number}" for number in (4, 3) if number <= level]
    return [name for name in (*names, "generic") if library_path(folder, name).exists()]
