"""Devices to compare, by name, and the price of an hour of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cubatch import checks
from cubatch.errors import InvalidArgument, UnknownName
from cubatch.hardware import probe
from cubatch.hardware.facts import Device


def distinct(devices: Iterable[Device | str | None]) -> dict[str, Device]:
    """
    Return devices by name, each once; None is the device of this machine.

    Raises:
        InvalidArgument: If there is no device, or two different devices have one name.
    """
    if isinstance(devices, str | Device) or not isinstance(devices, Iterable):
        raise InvalidArgument("devices", devices, "a list of GPUs' names, such as ['t4', 'a40']")
    gpus: dict[str, Device] = {}
    for gpu in (probe.resolve(given, live=False) for given in devices):
        if gpus.setdefault(_name(gpu), gpu) != gpu:
            remedy = "Two different GPUs have this name: change `name` in the file of one, or leave one out."
            raise InvalidArgument("devices", _name(gpu), "GPUs of different names", remedy)
    if not gpus:
        raise InvalidArgument("devices", [], "at least one GPU's name")
    return gpus


def prices_of(devices: Mapping[str, Device], prices: Mapping[str, float]) -> dict[str, float]:
    """
    Return the price of an hour of each given device, by name, if `prices` has it; other devices are left out.

    Raises:
        InvalidArgument: If a price is no positive number, a name is that of several devices, or two names of one device
            have different prices.
        UnknownName: If a price is of an unknown device.
    """
    paid: dict[str, float] = {}
    for given, price in prices.items():
        try:
            gpu = probe.resolve(given, live=False)
        except InvalidArgument as error:  # a name of several devices; an unknown name and a file name themselves
            if error.field != "device" or isinstance(error, UnknownName):
                raise
            raise InvalidArgument("prices", *error.args[1:]) from None
        name = _name(gpu)
        checks.check_number(f"prices[{given!r}]", price, above=0.0)
        if devices.get(name) != gpu:
            continue
        if paid.setdefault(name, float(price)) != price:
            raise InvalidArgument(f"prices[{given!r}]", price, f"{paid[name]!r}, as another name of {name} has it")
    return paid


def _name(gpu: Device) -> str:
    return gpu.slug or gpu.name
