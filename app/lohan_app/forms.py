"""HTML forms: texts into typed values, refusals kept beside the field they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from lohan_app.errors import Unprocessable

Model = TypeVar("Model", bound=BaseModel)


class FormError(Unprocessable):
    """A form with refused fields; `faults` has what is allowed by the field's last name (`batch_size`), for the page to show beside it."""

    def __init__(self, faults: Mapping[str, str]) -> None:
        super().__init__(
            "; ".join(f"{field}: {text}" for field, text in faults.items()),
            remedy="Correct the fields named above and send the form again.",
        )
        self.faults = dict(faults)


def read_form(model: type[Model], values: Mapping[str, object]) -> Model:
    """Check a form's values against the API's own model of the request, so that page and API refuse the same things.

    Raises:
        FormError: every fault at once.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        faults = {}
        for fault in error.errors():
            field = str(fault["loc"][-1]) if fault["loc"] else "form"
            shown = f" (found {str(fault['input'])[:100]})" if isinstance(fault["input"], str | int | float) else ""
            faults[field] = fault["msg"] + shown
        raise FormError(faults) from error


def without_blanks(values: Mapping[str, str]) -> dict[str, str]:
    """The fields that were filled in: one left empty means its default."""
    return {name: value.strip() for name, value in values.items() if value.strip()}


def local_path(address: str) -> str:
    """`address` if it is a path on this service, else the dashboard: a link to the login page cannot lead elsewhere afterwards."""
    is_local = address.startswith("/") and not address.startswith(("//", "/\\")) and "\\" not in address and address.isprintable()
    return address if is_local else "/"
