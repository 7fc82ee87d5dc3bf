"""What a result was measured on and with."""

import importlib.metadata
import subprocess
import time
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "torch", "triton", "fla-core")


def versions() -> dict[str, Any]:
    """Date, device, driver, and the versions of what is installed."""
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M"), "device": jax.devices()[0].device_kind}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError):
        found["driver"] = None
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
