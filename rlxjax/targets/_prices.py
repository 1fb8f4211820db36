"""The prices of devices per hour, from a file that you write."""

import os
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from rlxjax._files import Strict, read_json_file
from rlxjax.devices import target_device


class Prices(Strict):
    """The content of a file of prices.

    Attributes:
        about: where the prices come from, and their date.
        currency: currency of all prices, such as "USD".
        prices_per_hour: price of one device for an hour, by the name of the device or by the path of its file.
    """

    schema_version: Literal[1]
    about: str = ""
    currency: str
    prices_per_hour: Mapping[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]]

    def cost(self, name: str, devices: int, time_ns: float) -> float | None:
        """Return the cost of using a number of devices for a time in ns; None if the device has no price.

        Examples:
            >>> own = Prices(schema_version=1, currency="USD", prices_per_hour={"tpu-v5e": 2.0})
            >>> own.cost("tpu-v5e", 8, 3600e9), own.cost("h100", 8, 3600e9)
            (16.0, None)
        """
        price = self.prices_per_hour.get(name)
        return None if price is None else price * devices * time_ns / 3600e9


def load_prices(path: str | os.PathLike[str]) -> Prices:
    """Return the prices in a file. `docs/prices.example.json` shows the schema with invented figures.

    Raises:
        ValueError: the file is missing, is not JSON or violates the schema; a price is not a positive number; a device
            is unknown. The message is one line.
    """
    mend = 'write {"schema_version": 1, "currency": "USD", "prices_per_hour": {"h100": 4.0}} with your prices'
    found = read_json_file(path, Prices, 1, ValueError, mend, "a file of prices")
    try:
        named = {target_device(name).name: price for name, price in found.prices_per_hour.items()}
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: prices_per_hour: {error}") from None
    return found.model_copy(update={"prices_per_hour": named})
