"""How busy a device is, asked every 50 ms by a process of its own, so that nobody takes the trainer's interpreter.

Started by bench/gpu_utilisation.py. One line a value: where it comes from, when, per cent. It ends with its input.

`rates` is what nvmlDeviceGetUtilizationRates says at that moment, over a window that the driver chooses (1/6 s to 1 s);
`samples` are the driver's own, each with its time, if it keeps any. For a CPU: what the process used of one core.
"""

from __future__ import annotations

import argparse
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

PERIOD_S = 0.05
Value = tuple[str, float, float]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uuid", default="", help="of the device; without one, the process is watched")
    parser.add_argument("--pid", type=int, required=True)
    given = parser.parse_args()
    ask = asking_device(given.uuid) if given.uuid else asking_process(given.pid)
    due = time.monotonic()
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
        for source, when, percent in ask():
            print(f"{source} {when:.4f} {percent:.1f}", flush=True)
        due = max(due + PERIOD_S, time.monotonic())


def asking_process(pid: int) -> Callable[[], list[Value]]:
    import psutil

    process = psutil.Process(pid)
    process.cpu_percent()
    return lambda: [("process", time.time(), min(100.0, process.cpu_percent()))]


def asking_device(uuid: str) -> Callable[[], Iterator[Value]]:
    import pynvml

    pynvml.nvmlInit()
    handle = find_device(pynvml, uuid)
    newest_us = int(time.time() * 1e6)
    keeps_samples = True

    def ask() -> Iterator[Value]:
        nonlocal newest_us, keeps_samples
        yield "rates", time.time(), float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        if not keeps_samples:
            return
        try:
            _, samples = pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, newest_us)
        except pynvml.NVMLError_NotFound:
            return  # nothing new
        except (pynvml.NVMLError, TypeError) as error:
            keeps_samples = False
            print(f"the driver gives no samples: {error!r}", file=sys.stderr, flush=True)
            return
        for sample in samples:
            if sample.timeStamp > newest_us:
                newest_us = sample.timeStamp
                yield "samples", sample.timeStamp / 1e6, float(sample.sampleValue.uiVal)

    return ask


def find_device(pynvml: Any, uuid: str) -> Any:
    """By its own name, since CUDA_VISIBLE_DEVICES changes numbers; if that is not known here, the only one."""
    for name in (uuid, f"GPU-{uuid}"):
        for spelled in (name, name.encode()):
            try:
                return pynvml.nvmlDeviceGetHandleByUUID(spelled)
            except (pynvml.NVMLError, TypeError, AttributeError):
                continue
    return pynvml.nvmlDeviceGetHandleByIndex(0)


if __name__ == "__main__":
    main()
