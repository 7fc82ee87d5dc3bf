"""Several processes that run one model together, on JAX's own distributed runtime."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

HEARTBEAT_SECONDS = 20
"""After so long without a sign of life from one process, the others stop with a message."""


def connect(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_devices: int | Sequence[int] | None = None,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
    start_seconds: int = 300,
) -> None:
    """Joins this process to the others; before anything asks JAX for a device, and the same in each of them.

    Without arguments JAX finds out about the others itself, on TPU pods, under SLURM, Open MPI and Kubernetes. From then
    on `jax.devices()` are those of all processes, and every process makes the same calls with the same arguments.

    Args:
        coordinator: address of the first process, as in "10.0.0.1:1234"; None with the others None.
        num_processes: how many there are.
        process_id: number of this one, from 0.
        local_devices: numbers of the devices that this process uses, where several share a host; None: all.
        heartbeat_seconds: silence after which a process counts as dead, and the others end with an error.
        start_seconds: how long to wait for all to come.

    Raises:
        ValueError: some of the first three are given and others not, or they don't fit each other.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ValueError(f"{', '.join(missing)} must be given too: {given}. Or give none of them, and JAX finds out.")
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise ValueError(f"process_id={process_id}; it must be from 0 to num_processes - 1 = {num_processes - 1}.")
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise ValueError(f"coordinator={coordinator!r} must be host:port, as in '10.0.0.1:1234'.")
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        local_device_ids=local_devices,
        heartbeat_timeout_seconds=heartbeat_seconds,
        initialization_timeout=start_seconds,
    )


def parse_hosts(text: str) -> tuple[str | None, int | None, int | None]:
    """Reads `auto`, or `host:port,count,number` as arguments of `connect`.

    Raises:
        ValueError: it has another form.
    """
    if text == "auto":
        return None, None, None
    parts = text.split(",")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts[1:]):
        raise ValueError(
            f"hosts are {text!r}; legal are auto, or COORDINATOR:PORT,COUNT,NUMBER as in 10.0.0.1:1234,4,0."
        )
    return parts[0], int(parts[1]), int(parts[2])


def is_first() -> bool:
    """Whether this process is the one that speaks for all."""
    return jax.process_index() == 0


def agreed(values: np.ndarray) -> np.ndarray:
    """The first process's values, in every process."""
    if jax.process_count() == 1:
        return values
    from jax.experimental import multihost_utils

    found: Any = multihost_utils.broadcast_one_to_all(values)
    return np.asarray(found)
