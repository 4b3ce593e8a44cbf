"""Peak rates of devices, against which the share of used operations (MFU) is measured."""

from __future__ import annotations

import re

# dense bf16 FLOP/s from NVIDIA's data sheets, by words of the device's name; the first that fits counts
_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}


def peak_of(device: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its name as torch reports it; None for others, such as CPUs."""
    return next((peak for name, peak in _PEAKS.items() if re.search(rf"\b{name}\b", device)), None)
