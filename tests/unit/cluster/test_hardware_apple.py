"""Macs: what `sysctl` prints and Metal answers, and what follows for memory and dtypes."""

from __future__ import annotations

import pytest

from exo_train.cluster.apple import (
    gpu_dtypes,
    read_sysctl,
    wired_limit_bytes,
    working_set_bytes,
)
from exo_train.cluster.cpu import cpu_dtypes

GIB = 1 << 30
M1_16_GB = """\
iogpu.wired_limit_mb: 0
machdep.cpu.brand_string: Apple M1
hw.optional.arm.FEAT_BF16: 0
hw.optional.arm.FEAT_FP16: 1
"""
M2_ULTRA_192_GB_LIMIT_RAISED = """\
iogpu.wired_limit_mb: 184320
machdep.cpu.brand_string: Apple M2 Ultra
hw.optional.arm.FEAT_BF16: 1
hw.optional.arm.FEAT_FP16: 1
"""
INTEL = """\
machdep.cpu.brand_string: Intel(R) Core(TM) i7-8750H CPU @ 2.20GHz
sysctl: unknown oid 'iogpu.wired_limit_mb'
sysctl: unknown oid 'hw.optional.arm.FEAT_BF16'
"""
METAL_M3_16_GB = "working set 12713115648\n"
METAL_M5_128_GB = "some warning: 3\nworking set 115448725504\n"


def test_sysctls_lines() -> None:
    values = read_sysctl(M2_ULTRA_192_GB_LIMIT_RAISED)
    assert values["machdep.cpu.brand_string"] == "Apple M2 Ultra"
    assert wired_limit_bytes(values) == 180 * GIB
    assert wired_limit_bytes(read_sysctl(M1_16_GB)) is None, "0: macOS decides"
    assert wired_limit_bytes(read_sysctl(INTEL)) is None
    assert wired_limit_bytes(read_sysctl("")) is None
    assert "(TM) i7" in read_sysctl(INTEL)["machdep.cpu.brand_string"]


@pytest.mark.parametrize(
    ("total_gib", "sysctl", "metal", "expected_bytes"),
    [
        (16, M1_16_GB, METAL_M3_16_GB, 12713115648),
        (128, M1_16_GB, METAL_M5_128_GB, 115448725504),
        (16, M1_16_GB, "", int(16 * GIB * 2 / 3)),
        (36, M1_16_GB, "", 24 * GIB),
        (64, M1_16_GB, "", 48 * GIB),
        (192, M1_16_GB, "ModuleNotFoundError: No module named 'mlx'", 144 * GIB),
        (192, M2_ULTRA_192_GB_LIMIT_RAISED, METAL_M5_128_GB, 180 * GIB),
        (16, M2_ULTRA_192_GB_LIMIT_RAISED, "", 16 * GIB),
        (16, M1_16_GB, METAL_M5_128_GB, int(16 * GIB * 2 / 3)),
        (16, M1_16_GB, "working set 0", int(16 * GIB * 2 / 3)),
    ],
    ids=[
        "16 GB, Metal's word",
        "128 GB, Metal's word",
        "16 GB, no answer",
        "36 GB, no answer",
        "64 GB, no answer",
        "192 GB, no MLX",
        "192 GB, limit set by the user",
        "a limit above what there is",
        "an answer above what there is",
        "an answer of nothing",
    ],
)
def test_what_the_gpu_may_hold(
    total_gib: int, sysctl: str, metal: str, expected_bytes: int
) -> None:
    limit = wired_limit_bytes(read_sysctl(sysctl))
    held = working_set_bytes(total_gib * GIB, wired_limit_bytes=limit, metal_answer=metal)
    assert held == expected_bytes


@pytest.mark.parametrize(
    ("chip", "best"),
    [
        ("Apple M1 (8 cores)", "fp32"),
        ("Apple M2 Ultra (24 cores)", "fp32"),
        ("Apple M3 Max (16 cores)", "bf16"),
        ("Apple M10 (16 cores)", "bf16"),
        ("Apple A18 Pro (6 cores)", "bf16"),
        ("Apple processor (4 cores)", "fp32"),
        ("arm (8 cores)", "fp32"),
    ],
)
def test_a_gpu_that_emulates_bf16_does_not_take_it_by_itself(chip: str, best: str) -> None:
    dtypes = gpu_dtypes(chip)
    assert dtypes[0] == best
    assert sorted(dtypes) == ["bf16", "fp16", "fp32"], "who asks by name gets it"


def test_a_macs_cpu() -> None:
    for text, second in ((M1_16_GB, "fp16"), (M2_ULTRA_192_GB_LIMIT_RAISED, "bf16")):
        flags = {name for name, value in read_sysctl(text).items() if value == "1"}
        assert cpu_dtypes(flags)[:2] == ("fp32", second)
