"""GPUs through NVML, in the shapes that it answers in on PCs, servers and unified boards."""

from __future__ import annotations

import re

import pytest

from exo_train.cluster.hardware import cuda_processors, offer
from exo_train.cluster.nvidia import Gpu, Gpus, gpu_dtypes, read_gpus, visible_gpus
from exo_train.cluster.system_memory import Memory
from tests.unit.cluster.fake_nvml import (
    DRIVER_NOT_LOADED,
    GIB,
    GPU_IS_LOST,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    NOT_SUPPORTED,
    VERSION_MISMATCH,
    FakeGpu,
    FakeNvml,
    NVMLError,
)

SYSTEM = Memory(total_bytes=64 * GIB, free_bytes=48 * GIB)
RTX_4090 = FakeGpu(
    name="NVIDIA GeForce RTX 4090",
    total_bytes=24 * GIB,
    free_bytes=22 * GIB,
    uuid="GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
)
RTX_2060 = FakeGpu(
    name="NVIDIA GeForce RTX 2060",
    total_bytes=6 * GIB,
    free_bytes=5 * GIB,
    capability=(7, 5),
    uuid="GPU-0d0b6d3a-3a6b-4e2f-9a55-6a1f7e4a9c11",
)
GB10 = FakeGpu(name="NVIDIA GB10", total_bytes=NVMLError(NOT_SUPPORTED), capability=(12, 1))
A100 = FakeGpu(
    name="NVIDIA A100-SXM4-40GB",
    total_bytes=NVMLError(NO_PERMISSION),
    capability=(8, 0),
    mig=[1, 1],
    parts=(
        FakeGpu(
            name="NVIDIA A100-SXM4-40GB MIG 1g.5gb",
            total_bytes=5 * GIB,
            free_bytes=4 * GIB,
            capability=NVMLError(NOT_SUPPORTED),
            uuid="MIG-1",
        ),
        FakeGpu(
            name="NVIDIA A100-SXM4-40GB MIG 2g.10gb",
            total_bytes=10 * GIB,
            free_bytes=9 * GIB,
            capability=NVMLError(NOT_SUPPORTED),
            uuid="MIG-2",
        ),
    ),
)


def found(*gpus: FakeGpu | NVMLError, visible: str | None = None) -> tuple[Gpu, ...]:
    nvml = FakeNvml(gpus)
    result = read_gpus(nvml, visible=visible)
    assert result.trouble == ""
    assert nvml.opened == 0, "NVML is closed again"
    return result.found


def test_a_driver_without_gpus() -> None:
    assert found() == ()


def test_free_video_memory_of_each_gpu() -> None:
    first, second = found(RTX_4090, RTX_2060)
    assert first == Gpu(
        device="cuda:0",
        name="NVIDIA GeForce RTX 4090",
        memory=Memory(total_bytes=24 * GIB, free_bytes=22 * GIB),
        capability=(8, 9),
    )
    assert (second.device, second.memory) == (
        "cuda:1",
        Memory(total_bytes=6 * GIB, free_bytes=5 * GIB),
    )


@pytest.mark.parametrize(
    "board",
    [GB10, FakeGpu(name="Orin (nvgpu)", total_bytes=0, capability=(8, 7))],
    ids=["not supported", "zeros"],
)
def test_a_board_without_memory_of_its_own_takes_the_systems(board: FakeGpu) -> None:
    [gpu] = found(board)
    assert gpu.memory is None
    hardware = offer("torch", cuda_processors(Gpus((gpu,)), SYSTEM), memory_bytes=None)
    assert hardware.memory_bytes == 64 * GIB
    assert hardware.usable_memory_bytes == int(48 * GIB * 0.88)
    assert hardware.dtypes[0] == "bf16"


@pytest.mark.parametrize("how", ["no handle", "no memory"])
def test_a_lost_gpu_is_left_out_and_the_other_keeps_its_number(how: str) -> None:
    lost = NVMLError(GPU_IS_LOST)
    broken = lost if how == "no handle" else FakeGpu(name="RTX 3090", total_bytes=lost)
    [gpu] = found(broken, RTX_2060)
    assert (gpu.device, gpu.name) == ("cuda:1", "NVIDIA GeForce RTX 2060")


def test_fields_that_a_gpu_does_not_tell() -> None:
    silent = FakeGpu(
        name=NVMLError(NOT_SUPPORTED),
        total_bytes=8 * GIB,
        free_bytes=7 * GIB,
        capability=NVMLError(NOT_SUPPORTED),
        uuid=NVMLError(NOT_SUPPORTED),
        mig=NVMLError(NO_PERMISSION),
    )
    [gpu] = found(silent)
    assert gpu.name == "NVIDIA GPU"
    assert gpu.memory == Memory(total_bytes=8 * GIB, free_bytes=7 * GIB)
    assert gpu_dtypes(gpu.capability) == ("fp32",), "nothing is promised that may be missing"


def test_a_divided_gpu_gives_its_first_part_or_the_named_one() -> None:
    [first] = found(A100)
    assert first.memory == Memory(total_bytes=5 * GIB, free_bytes=4 * GIB)
    assert gpu_dtypes(first.capability)[0] == "bf16"
    [named] = found(A100, visible="MIG-2")
    assert named.memory == Memory(total_bytes=10 * GIB, free_bytes=9 * GIB)
    assert gpu_dtypes(named.capability)[0] == "bf16"
    assert found(FakeGpu(name="A30", total_bytes=24 * GIB, mig=[1, 1])) == (), "no part was made"


@pytest.mark.parametrize("code", [LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED])
def test_no_driver_is_no_trouble(code: int) -> None:
    gpus = read_gpus(FakeNvml(init=code), visible=None)
    assert (gpus.found, gpus.trouble) == ((), "")


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (VERSION_MISMATCH, "was updated and its old version still runs: restart this computer"),
        (NO_PERMISSION, r"does not answer \(Insufficient Permissions\)"),
    ],
)
def test_a_driver_that_cannot_be_asked_is_trouble_with_a_way_out(code: int, sentence: str) -> None:
    gpus = read_gpus(FakeNvml([RTX_4090], init=code), visible=None)
    assert gpus.found == ()
    assert re.search(sentence, gpus.trouble)


UUIDS = ("GPU-8932f937-d72c", "GPU-8932aaaa-0000", "GPU-0d0b6d3a-3a6b")


@pytest.mark.parametrize(
    ("visible", "places"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,1", [2, 1]),
        (" 1 , 0 ", [1, 0]),
        ("0,2,-1,1", [0, 2]),
        ("0,9,1", [0]),
        ("0,0", []),
        ("GPU-0d0b6d3a-3a6b", [2]),
        ("GPU-0d,GPU-8932f", [2, 0]),
        ("GPU-8932", []),
        ("GPU-ffff,0", []),
        ("1,GPU-0d", [1, 2]),
        ("MIG-4c1b7f2e", ["MIG-4c1b7f2e"]),
        ("NoDevFiles", []),
    ],
)
def test_visible_gpus_in_cudas_own_way(visible: str | None, places: list[int | str]) -> None:
    assert visible_gpus(visible, UUIDS) == places


def test_what_is_hidden_is_not_offered_and_numbers_follow_the_variable() -> None:
    first, second = found(RTX_4090, RTX_2060, visible="GPU-0d0b6d3a,0")
    assert (first.device, first.name) == ("cuda:0", "NVIDIA GeForce RTX 2060")
    assert (second.device, second.name) == ("cuda:1", "NVIDIA GeForce RTX 4090")
    assert [gpu.name for gpu in found(RTX_4090, RTX_2060, visible="1")] == [RTX_2060.name]


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        ((12, 0), ("bf16", "fp16", "fp32")),
        ((8, 0), ("bf16", "fp16", "fp32")),
        ((7, 5), ("fp32", "fp16")),
        ((6, 1), ("fp32", "fp16")),
        ((5, 3), ("fp32", "fp16")),
        ((5, 2), ("fp32",)),
        (None, ("fp32",)),
    ],
)
def test_no_emulated_dtype(capability: tuple[int, int] | None, dtypes: tuple[str, ...]) -> None:
    assert gpu_dtypes(capability) == dtypes
