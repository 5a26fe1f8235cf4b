"""
The devices of this machine, and the one resolver of every `device=` argument.

A live Device holds what the driver or the kernel says of this machine.  Peak rates, which
neither tells, come from the catalogue where the board is in it without doubt, and never replace
a live fact.  Nothing here makes a CUDA context.
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
    List the devices of this machine: the GPUs that CUDA shows to this process, then the CPU.

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
    Get a device of this machine, or the facts of one that is not here.

    Args:
        name: None: the first GPU, else the CPU. "cpu", "cuda" or "gpu" (the first GPU), "cuda:1": a live device.
            "GPU-...", "MIG-...": the live device of this uuid, whatever its number.
            A path that ends in .toml: a file that describes one, see docs/reference/files.md; not live.
            Anything else: a name or alias of the catalogue, "v100-sxm2-16gb"; not live.  What the catalogue does not
            tell is looked for among the names of the devices here, as `devices()` gives them: "AMD EPYC".

    Returns:
        Device: Its facts; unknown ones are None.

    Raises:
        DeviceNotAvailable: If a live device was named that is not here.
        InvalidArgument: If several devices of the catalogue go by the name, or the file makes no sense.
        UnknownName: If none does.
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
        raise DeviceNotAvailable(name, f"this process sees {_count(gpus)}, counted from cuda:0{_mask()}")
    return gpus[index]


def resolve(device: Device | str | None, *, live: bool = True) -> Device:
    """
    Turn any `device=` argument into a Device.

    Args:
        device: None, a name as for `device()`, or a Device.
        live: Whether it must be in this machine, because something is to be measured on it. A name of
            the catalogue, or a Device from it, then stands for the first GPU here that is of that kind.

    Returns:
        Device: With `live` set if that was demanded.

    Raises:
        DeviceNotAvailable: If it must be here and is not.
        InvalidArgument: If it is neither of these, or the name is that of several devices.
        UnknownName: If no device goes by the name.
        DeviceFailed: If there is a GPU driver and it does not work.

    Example:
        >>> resolve("cpu").live
        True
    """
    found = device if isinstance(device, Device) else _named(device)
    return _present(found) if live else found


def _named(name: str | None) -> Device:
    """Call `device()` where an argument has its name."""
    return device(name)


def _by_uuid(uuid: str) -> Device:
    """Find a GPU of this process by what NVML calls it."""
    gpus = _gpus()
    found = next((gpu for gpu in gpus if (gpu.uuid or "").lower() == uuid.lower()), None)
    if found is None:
        raise DeviceNotAvailable(
            uuid, f"this process sees {_count(gpus)}, none of this uuid{_mask()}", "See nvidia-smi -L."
        )
    return found


def _catalogue(name: str) -> Device:
    """Find a name in the catalogue, or here; what looks like a file is told how it would be one."""
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
    """Find the device of this machine whose own name is given; of several GPUs of one name the first."""
    try:
        here = devices()
    except DeviceFailed:  # whatever it is called, it is not this that was asked
        here = [_cpu()]
    return next((one for one in here if one.name.lower() == name.strip().lower()), None)


def _present(wanted: Device) -> Device:
    if wanted.kind == "cpu":
        return wanted if wanted.live else _cpu()
    remedy = "cubatch predict, candidates and memory work for a GPU that is not here."
    if not wanted.live and not wanted.slug:
        reason = 'a GPU that a file or a Device describes is in no machine; the first one here is "cuda"'
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
    return [_gpu(found) for found in driver.visible_gpus()]


def _gpu(found: VisibleGpu) -> Device:
    facts = _catalogued(found)
    whole = facts if facts is not None and not found.mig else None
    return Device(
        name=found.name,
        kind="cuda",
        slug=whole.slug if whole else "",
        architecture=facts.architecture if facts else "",
        compute_capability=found.compute_capability,
        num_sms=found.num_sms,
        # A slice has no published rates, and what it gets of the DRAM's and the clock's is not its share of SMs.
        peak_flops_per_second=whole.peak_flops_per_second if whole else {},
        peak_bytes_per_second=whole.peak_bytes_per_second if whole else None,
        memory_bytes=found.memory_bytes,
        l2_bytes=found.l2_bytes,
        clock_hz=found.clock_hz,
        tensor_cores=facts.tensor_cores if facts else architectures.like(found.compute_capability).has_tensor_cores,
        power_limit_watts=_power_limit(found.uuid),
        uuid=found.uuid,
        mig=found.mig,
        index=found.index,
        integrated=found.integrated,
        live=True,
        source=f"the CUDA driver; rates: {whole.source}" if whole else "the CUDA driver",
    )


def _catalogued(found: VisibleGpu) -> Device | None:
    """Find the board in the catalogue; None if there is any doubt that it is this one."""
    name, capability = found.name.partition(" MIG ")[0], found.compute_capability
    if found.mig is None:
        return catalogue.board(name, capability, found.num_sms, found.memory_bytes, found.bytes_per_second)
    named = catalogue.sharing(name)  # of the board the driver says what the slice has
    return named[0] if [one.compute_capability for one in named] == [capability] else None


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
