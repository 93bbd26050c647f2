"""CPUs, from /proc/cpuinfo as it looks on PCs and boards."""

from __future__ import annotations

import pytest

from exo_train.cluster.cpu import cpu_dtypes, read_cpuinfo

ZEN_4 = """\
processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD Ryzen 9 7950X 16-Core Processor
flags\t\t: fpu sse2 f16c avx2 avx512f avx512vl avx512_bf16 avx512_vnni
bugs\t\t: sysret_ss_attrs

processor\t: 1
model name\t: another
flags\t\t: fpu
"""
SAPPHIRE_RAPIDS = "model name\t: Intel(R) Xeon\nflags\t\t: avx512_bf16 amx_bf16 avx512_fp16\n"
HASWELL = "model name\t: Intel(R) Core(TM) i5-4460\nflags\t\t: fpu sse2 f16c avx2\n"
RASPBERRY_PI_5 = """\
processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm aes fphp asimdhp cpuid
CPU implementer\t: 0x41

Hardware\t: BCM2835
Model\t\t: Raspberry Pi 5 Model B Rev 1.0
"""
GRACE = "processor\t: 0\nFeatures\t: fp asimd fphp asimdhp sve svebf16 i8mm bf16\n"


@pytest.mark.parametrize(
    ("text", "name", "dtypes"),
    [
        (ZEN_4, "AMD Ryzen 9 7950X 16-Core Processor", ("fp32", "bf16", "fp16")),
        (SAPPHIRE_RAPIDS, "Intel(R) Xeon", ("fp32", "bf16", "fp16")),
        (HASWELL, "Intel(R) Core(TM) i5-4460", ("fp32", "bf16", "fp16")),
        (RASPBERRY_PI_5, "Raspberry Pi 5 Model B Rev 1.0", ("fp32", "fp16", "bf16")),
        (GRACE, "", ("fp32", "bf16", "fp16")),
        ("", "", ("fp32", "bf16", "fp16")),
    ],
    ids=["zen 4", "sapphire rapids", "haswell", "raspberry pi 5", "grace", "unreadable"],
)
def test_name_and_dtypes(text: str, name: str, dtypes: tuple[str, ...]) -> None:
    found, flags = read_cpuinfo(text)
    assert found == name
    assert cpu_dtypes(flags) == dtypes
