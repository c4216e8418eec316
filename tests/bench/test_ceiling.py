"""The read ceiling and the datasheet's figures."""

import pytest
import torch

from bench.ceiling import Ceiling, measure_ceiling
from runtime.device import datasheet_gbps


@pytest.mark.parametrize(
    ("name", "gbps"),
    [
        ("NVIDIA H200", 4800),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H100 PCIe", 2000),
        ("NVIDIA GH200 480GB", 4000),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA L40S", 864),
        ("NVIDIA L4", 300),
        ("NVIDIA GeForce RTX 4090", 1008),
        ("Tesla T4", None),
    ],
)
def test_a_device_finds_its_own_datasheet(name, gbps):
    assert datasheet_gbps(name) == gbps


def test_the_floor_is_bytes_over_the_ceiling():
    ceiling = Ceiling(4610.0, "given", 4800.0)
    assert ceiling.floor_ms(13.21e9) == pytest.approx(2.8655, abs=1e-4)
    assert "4,610.0 GB/s (given); datasheet 4,800 GB/s" in str(ceiling)


def test_the_cpu_is_measured_and_says_how():
    ceiling = measure_ceiling(torch.device("cpu"))
    assert ceiling.measured_gbps > 0
    assert ceiling.datasheet_gbps is None
    assert "torch.sum" in ceiling.how


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_memory_reads_faster_than_its_datasheet():
    ceiling = measure_ceiling(torch.device("cuda"))
    print(ceiling)
    assert ceiling.datasheet_gbps is None or ceiling.measured_gbps < ceiling.datasheet_gbps
