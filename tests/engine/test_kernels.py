"""The compiled kernels against torch, for every instruction set that this machine runs."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from core.errors import ConfigError
from engine.kernels import LIBRARY_FOLDER, Kernels, load_kernels, packed_floats
from engine.native import compile as native_compile

ISAS = ("generic", "x86-64-v3", "x86-64-v4")


def kernels_or_skip(isa, num_threads=1) -> Kernels:
    try:
        kernels = load_kernels(isa, num_threads=num_threads)
    except ConfigError as error:
        pytest.skip(str(error))
    assert kernels is not None
    return kernels


@pytest.fixture(params=ISAS)
def kernels(request):
    return kernels_or_skip(request.param)


def packed(kernels, weight):
    n, k = weight.shape
    memory = torch.empty(packed_floats(n, k))
    kernels.pack(weight, memory)
    return memory


@pytest.mark.parametrize("n,k", [(1, 1), (16, 8), (37, 19), (64, 48), (200, 130)])
def test_linear_equals_torch_for_any_shape(kernels, n, k):
    torch.manual_seed(n)
    weight, bias = torch.randn(n, k), torch.randn(n)
    memory = packed(kernels, weight)
    for rows in (0, 1, 2, 5, 6, 7, 8, 9, 16, 17, 64, 193, 400):
        x = torch.randn(rows, k)
        assert torch.allclose(
            kernels.linear(x, memory, n, bias), functional.linear(x, weight, bias), atol=1e-4
        )
        assert torch.allclose(
            kernels.linear(x, memory, n, None), functional.linear(x, weight), atol=1e-4
        )


def test_linear_takes_rows_that_lie_apart(kernels):
    weight, wide = torch.randn(20, 12), torch.randn(9, 50)
    x = wide[:, 7:19]
    out = kernels.linear(x, packed(kernels, weight), 20, None)
    assert torch.allclose(out, x @ weight.T, atol=1e-5)
    turned = torch.randn(12, 9).T
    assert torch.allclose(
        kernels.linear(turned, packed(kernels, weight), 20, None), turned @ weight.T, atol=1e-5
    )


def test_a_row_of_linear_has_the_same_bits_in_any_company(kernels):
    weight = torch.randn(70, 90)
    memory = packed(kernels, weight)
    x = torch.randn(203, 90)
    whole = kernels.linear(x, memory, 70, None)
    for first, count in ((0, 1), (5, 2), (7, 9), (100, 31), (202, 1)):
        part = kernels.linear(x[first : first + count], memory, 70, None)
        assert torch.equal(part, whole[first : first + count])


@pytest.mark.parametrize("isa", ISAS)
def test_threads_share_the_work_and_change_nothing(isa):
    one, two = kernels_or_skip(isa), kernels_or_skip(isa, num_threads=2)
    weight, x = torch.randn(130, 64), torch.randn(250, 64)
    memory = packed(one, weight)
    assert torch.equal(one.linear(x, memory, 130, None), two.linear(x, memory, 130, None))
    scale = torch.randn(64)
    assert torch.equal(one.rms_norm(x, scale, 1e-6), two.rms_norm(x, scale, 1e-6))
    assert torch.equal(one.silu_mul(x), two.silu_mul(x))


@pytest.mark.parametrize("dim", [1, 7, 16, 100])
def test_rms_norm_equals_its_formula(kernels, dim):
    x, weight = 5 * torch.randn(3, 70, dim), torch.randn(dim)
    expected = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    assert torch.allclose(kernels.rms_norm(x, weight, 1e-5), expected, atol=1e-5)


def test_silu_mul_equals_torch_also_at_the_ends(kernels):
    gate = torch.tensor([-1e30, -1000.0, -100.0, -88.0, -20.0, -1.0, 0.0, 1e-9, 1.0, 50.0, 1e30])
    gate = torch.cat([gate, torch.randn(50)])
    up = torch.randn(len(gate))
    out = kernels.silu_mul(torch.cat([gate, up])[None])
    expected = functional.silu(gate) * up
    assert torch.allclose(out[0], expected, rtol=1e-5, atol=1e-6)


def test_kernels_and_torch_use_one_openmp_runtime():
    kernels_or_skip("generic")
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc")
    runtimes = {line.split()[-1] for line in maps.read_text().splitlines() if "gomp" in line}
    assert len(runtimes) == 1


def test_missing_libraries_mean_torch_and_a_warning_with_the_fix(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert load_kernels("auto", folder=tmp_path) is None
    assert "engine.native.compile" in caplog.text


def test_no_kernels_can_be_asked_for_and_unknown_ones_are_refused(caplog):
    assert load_kernels("none") is None
    assert not caplog.records
    with pytest.raises(ConfigError, match="x86-64-v9"):
        load_kernels("x86-64-v9")


def test_compiling_without_a_compiler_makes_nothing_and_says_so(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert native_compile.compile_libraries(tmp_path) == []
    assert "C compiler" in caplog.text


def test_a_source_that_does_not_compile_is_reported_and_leaves_no_library(tmp_path, caplog):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (tmp_path / "wrong.c").write_text("this is not C;")
    assert native_compile.compile_libraries(tmp_path) == []
    assert "could not compile" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.c"]


def test_other_machines_get_the_generic_library_alone():
    assert list(native_compile.targets("aarch64")) == ["generic"]
    assert len(native_compile.targets("x86_64")) == 3


def test_a_library_of_other_sources_is_not_found(tmp_path, caplog):
    """Its functions may take other arguments: calling them would corrupt memory."""
    for path in LIBRARY_FOLDER.iterdir():
        if path.suffix in (".c", ".h", ".so"):
            shutil.copy(path, tmp_path)
    if load_kernels("auto", folder=tmp_path) is None:
        pytest.skip("no C compiler made libraries here")
    with (tmp_path / "linear.c").open("a") as source:
        source.write("/* changed */\n")
    assert load_kernels("auto", folder=tmp_path) is None
    assert "only of other sources" in caplog.text
