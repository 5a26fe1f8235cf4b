"""
The devices of this machine, and the resolver of every `device=` argument.

A live Device holds facts from the driver or the kernel. Peak rates, which neither reports, come from the catalogue if
the board is in it without doubt. They never replace a live fact. Nothing here creates a CUDA context.
"""

from __future__ import annotations

import os
import re

from cubatch.errors import DeviceFailed, DeviceNotAvailable, InvalidArgument, UnknownName
from cubatch.hardware import architectures, catalogue, device_file, driver, host, nvml
from cubatch.hardware.driver import VisibleGpu
from cubatch.hardware.facts import Device

_UUIDS = ("gpu-", "mig-")
_LIVE_NAME = re.compile(r"(?:cuda|gpu)(?::([0-9]+))?")


def devices() -> list[Device]:
    """
    Return the devices of this machine: the GPUs that CUDA shows to this process, then the CPU.

    Raises:
        DeviceFailed: If there is a GPU driver and it does not work.

    Example:
        >>> devices()[-1].kind
        'cpu'
    """
    try:
        return [*_gpus(), _cpu()]
    except DeviceNotAvailable:
        return [_cpu()]


def device(name: str | None = None) -> Device:
    """
    Return a device of this machine, or the facts of a device that is not in this machine.

    Args:
        name: None is the first GPU, else the CPU. "cpu", "cuda" or "gpu" (the first GPU) and "cuda:1" are live devices:
            those of this machine, which can be measured on.
            "GPU-..." and "MIG-..." are the live device with this uuid.
            A path that ends in .toml is a file that describes a device, see docs/reference/files.md; it is not live.
            Any other text is a name or alias of the catalogue, "v100-sxm2-16gb"; it is not live. For a name that the
            catalogue lacks, the live device whose full name it is counts: "AMD EPYC 9534 64-Core Processor".

    Returns:
        Device: Its facts; unknown ones are None.

    Raises:
        DeviceNotAvailable: If the name means a live device that is not in this machine.
        InvalidArgument: If several devices of the catalogue have the name, the file describes no device, or `name` is
            neither text nor None.
        UnknownName: If no device has that name.
        DeviceFailed: If there is a GPU driver and it does not work.

    Example:
        >>> device("titan-x-pascal").num_sms
        28
    """
    if name is None:
        return devices()[0]
    if not isinstance(name, str):
        raise InvalidArgument("device", name, "a name, such as 'cpu', 'cuda:0' or 'v100-sxm2-16gb', or None")
    spelled = name.strip().lower()
    if spelled == "cpu":
        return _cpu()
    if spelled.endswith(device_file.SUFFIX):
        return device_file.read(name.strip())
    live = _LIVE_NAME.fullmatch(spelled)
    if live is None:
        return _by_uuid(name.strip()) if spelled.startswith(_UUIDS) else _catalogue(name)
    gpus = _gpus()
    index = int(live[1] or 0)
    if index >= len(gpus):
        reason = f"this process sees {_count(gpus)}, counted from cuda:0{_mask()}"
        raise DeviceNotAvailable(name, reason, "`cubatch devices` lists them.")
    return gpus[index]


def resolve(device: Device | str | None, *, live: bool = True) -> Device:
    """
    Return the device that a `device=` argument of a public function means.

    Args:
        device: None, a name as for `device()`, or a Device.
        live: Whether the device must be in this machine, for measurements. A name or a Device of the catalogue then
            means the first GPU of this machine that is of that kind.
    """
    resolved = device if isinstance(device, Device) else _by_name(device)
    return _present(resolved) if live else resolved


def _by_name(name: str | None) -> Device:  # for functions whose argument is called `device`
    return device(name)


def _by_uuid(uuid: str) -> Device:
    gpus = _gpus()
    gpu = next((gpu for gpu in gpus if (gpu.uuid or "").lower() == uuid.lower()), None)
    if gpu is None:
        raise DeviceNotAvailable(
            uuid, f"this process sees {_count(gpus)}, none of this uuid{_mask()}", "See nvidia-smi -L."
        )
    return gpu


def _catalogue(name: str) -> Device:
    """Return the device of a name, in the catalogue or this machine; raise InvalidArgument for none or several."""
    try:
        return catalogue.find(name)
    except InvalidArgument as error:
        if here := _called(name):
            return here
        if not isinstance(error, UnknownName) or not {"/", "\\"} & set(name):
            raise
        remedy = f"A file that describes a GPU ends in {device_file.SUFFIX}."
        raise InvalidArgument("device", name, "a name, or a file that describes a GPU", remedy) from None


def _called(name: str) -> Device | None:
    try:
        here = devices()
    except DeviceFailed:  # the name may still be the CPU's
        here = [_cpu()]
    return next((device for device in here if device.name.lower() == name.strip().lower()), None)


def _present(wanted: Device) -> Device:
    """Return the live device of this machine that `wanted` describes; raise DeviceNotAvailable if none does."""
    if wanted.kind == "cpu":
        return wanted if wanted.live else _cpu()
    remedy = "cubatch predict, candidates and memory work for a GPU that is not here."
    if not wanted.live and not wanted.slug:
        reason = 'a GPU described by a file or a Device is in no machine; the first one here is "cuda"'
        raise DeviceNotAvailable(wanted.name, reason, remedy)
    try:
        gpus = _gpus()
    except DeviceNotAvailable as error:
        raise DeviceNotAvailable(wanted.slug or wanted.name, error.reason, remedy) from error
    for gpu in gpus:
        if gpu.uuid == wanted.uuid if wanted.live else gpu.slug and gpu.slug == wanted.slug:
            return gpu
    here = ", ".join(map(str, gpus))
    raise DeviceNotAvailable(wanted.slug or wanted.name, f"it is not among the GPUs here ({here}){_mask()}", remedy)


def _gpus() -> list[Device]:
    return [_gpu(gpu) for gpu in driver.visible_gpus()]


def _gpu(gpu: VisibleGpu) -> Device:
    facts = _catalogued(gpu)
    whole = facts if facts is not None and not gpu.mig else None
    return Device(
        name=gpu.name,
        kind="cuda",
        slug=whole.slug if whole else "",
        architecture=facts.architecture if facts else "",
        compute_capability=gpu.compute_capability,
        num_sms=gpu.num_sms,
        # A slice has no published rates, and its share of the DRAM's bandwidth is not its share of SMs.
        peak_flops_per_second=whole.peak_flops_per_second if whole else {},
        peak_bytes_per_second=whole.peak_bytes_per_second if whole else None,
        memory_bytes=gpu.memory_bytes,
        l2_bytes=gpu.l2_bytes,
        clock_hz=gpu.clock_hz,
        tensor_cores=facts.tensor_cores if facts else architectures.like(gpu.compute_capability).has_tensor_cores,
        power_limit_watts=_power_limit(gpu.uuid),
        uuid=gpu.uuid,
        mig=gpu.mig,
        index=gpu.index,
        integrated=gpu.integrated,
        live=True,
        source=f"the CUDA driver; rates: {whole.source}" if whole else "the CUDA driver",
    )


def _catalogued(gpu: VisibleGpu) -> Device | None:
    name, capability = gpu.name.partition(" MIG ")[0], gpu.compute_capability
    if gpu.mig is None:
        return catalogue.board(name, capability, gpu.num_sms, gpu.memory_bytes, gpu.bytes_per_second)
    named = catalogue.sharing(name)  # the driver reports the SMs and memory of the slice, not of the board
    return named[0] if [board.compute_capability for board in named] == [capability] else None


def _power_limit(uuid: str) -> float | None:
    try:
        return nvml.Monitor(uuid).power_limit_watts()
    except (DeviceNotAvailable, DeviceFailed):  # the driver lists it, and it works without NVML
        return None


def _cpu() -> Device:
    caches = host.cpu_caches()
    return Device(
        name=host.cpu_name(),
        kind="cpu",
        threads=host.cpu_threads(),
        caches=caches,
        l2_bytes=caches.get("L2"),
        memory_bytes=host.total_memory_bytes(),
        live=True,
        source="/proc and /sys",
    )


def _count(gpus: list[Device]) -> str:
    return f"{len(gpus)} GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"


def _mask() -> str:
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if mask is None else f" with CUDA_VISIBLE_DEVICES={mask}"
