"""Turns RoPE scaling as GGUF keeps it into the parameters that Hugging Face names.

GGUF keeps linear and YaRN scaling as metadata. Of Llama 3's scaling it keeps only the result: one
divisor per frequency (`rope_freqs.weight`). The parameters are recovered from these divisors, and
accepted only when they give the same divisors again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from twinplane.models.errors import ConversionUnsupported, ModelInvalid
from twinplane.models.gguf.file import GgufFile


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float

    def config(self) -> dict[str, object]:
        """Hugging Face's `rope_scaling`."""
        return {"rope_type": "linear", "factor": self.factor}


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071).

    Frequencies that turn at least `beta_fast` times over the original context are kept. Those that
    turn at most `beta_slow` times are divided by `factor`. A ramp lies between them.
    """

    factor: float
    original_context_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def config(self) -> dict[str, object]:
        """Hugging Face's `rope_scaling`."""
        return {
            "rope_type": "yarn",
            "factor": self.factor,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "original_max_position_embeddings": self.original_context_length,
        }


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths are divided by `factor`, short ones are kept; a ramp lies between."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context_length: int

    def config(self) -> dict[str, object]:
        """Hugging Face's `rope_scaling`."""
        return {
            "rope_type": "llama3",
            "factor": self.factor,
            "low_freq_factor": self.low_frequency_factor,
            "high_freq_factor": self.high_frequency_factor,
            "original_max_position_embeddings": self.original_context_length,
        }

    def divisors(self, head_size: int, theta: float) -> list[float]:
        """The divisor of each of the head_size / 2 frequencies."""
        result = []
        for wavelength in _wavelengths(head_size, theta):
            turns = self.original_context_length / wavelength
            low, high = self.low_frequency_factor, self.high_frequency_factor
            kept = min(1.0, max(0.0, (turns - low) / (high - low)))
            result.append(1.0 / ((1.0 - kept) / self.factor + kept))
        return result


RopeScaling = LinearScaling | YarnScaling | Llama3Scaling


def read_rope_scaling(file: GgufFile, head_size: int, theta: float) -> RopeScaling | None:
    """The file's scaling, or None. Raises ConversionUnsupported for one without an equivalent."""
    kind = file.find_text("llama.rope.scaling.type")
    factor = _read_factor(file)
    if kind is None and factor is not None and factor != 1.0:
        kind = "linear"
    if file.has_tensor("rope_freqs.weight"):
        if kind not in (None, "none"):
            raise ConversionUnsupported(f"{file.path}: rope_freqs together with {kind} scaling")
        divisors = [float(value) for part in file.rows("rope_freqs.weight") for value in part]
        return _recover_llama3(file, divisors, head_size, theta)
    match kind:
        case None | "none":
            return None
        case "linear" if factor:
            return LinearScaling(factor)
        case "yarn" if factor:
            return _read_yarn(file, factor)
        case _:
            raise ConversionUnsupported(f"{file.path}: rope scaling {kind} with factor {factor}")


def _read_factor(file: GgufFile) -> float | None:
    """The factor under its name of today or of before. Raises ModelInvalid."""
    keys = ("llama.rope.scaling.factor", "llama.rope.scale_linear")
    found = {key: value for key in keys if (value := file.find_float(key)) is not None}
    for key, value in found.items():
        if value <= 0.0:
            raise ModelInvalid(f"{file.path}: {key} is {value}, must be above 0")
    if len(set(found.values())) > 1:
        raise ModelInvalid(f"{file.path}: {keys[0]} and {keys[1]} differ")
    return next(iter(found.values()), None)


def _read_yarn(file: GgufFile, factor: float) -> YarnScaling:
    """Raises ConversionUnsupported for what Hugging Face's YaRN computes otherwise."""
    original = file.find_size("llama.rope.scaling.original_context_length")
    scaling = YarnScaling(factor, original or file.need_size("llama.context_length"))
    fast = file.find_float("llama.rope.scaling.yarn_beta_fast")
    slow = file.find_float("llama.rope.scaling.yarn_beta_slow")
    scaling = replace(
        scaling,
        beta_fast=scaling.beta_fast if fast is None else fast,
        beta_slow=scaling.beta_slow if slow is None else slow,
    )
    # transformers takes a zero for its default, and a ramp turned round differs from llama.cpp's.
    if not 0.0 < scaling.beta_slow <= scaling.beta_fast < math.inf:
        raise ConversionUnsupported(
            f"{file.path}: llama.rope.scaling.yarn_beta_fast is {scaling.beta_fast},"
            f" yarn_beta_slow is {scaling.beta_slow}"
        )
    return scaling


def _wavelengths(head_size: int, theta: float) -> list[float]:
    return [2 * math.pi * theta ** (2 * i / head_size) for i in range(head_size // 2)]


def _recover_llama3(
    file: GgufFile, divisors: list[float], head_size: int, theta: float
) -> Llama3Scaling | None:
    if len(divisors) != head_size // 2 or not all(0.0 < each < math.inf for each in divisors):
        raise ConversionUnsupported(
            f"{file.path}: rope_freqs.weight must hold {head_size // 2} divisors above 0"
        )
    if all(divisor == 1.0 for divisor in divisors):
        return None
    for candidate in _llama3_candidates(divisors, head_size, theta):
        again = candidate.divisors(head_size, theta)
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(again, divisors, strict=True)):
            return candidate
    raise ConversionUnsupported(f"{file.path}: rope_freqs.weight is not Llama 3's scaling")


def _llama3_candidates(divisors: list[float], head_size: int, theta: float) -> list[Llama3Scaling]:
    """Possible parameters: first those of published models, then those that the ramp's slope gives.

    On the ramp the kept share is (context / wavelength - low) / (high - low), which is linear in
    1 / wavelength. It depends only on the ratios of context, low and high, so low is taken as 1.
    """
    factor = float(f"{max(divisors):.6g}")
    candidates = [Llama3Scaling(factor, 1.0, 4.0, 8192)]
    ramp = [
        (1.0 / wavelength, (1.0 / divisor - 1.0 / factor) / (1.0 - 1.0 / factor))
        for wavelength, divisor in zip(_wavelengths(head_size, theta), divisors, strict=False)
        if 1.001 < divisor < 0.999 * factor
    ]
    if len(ramp) >= 2:
        (x0, y0), (x1, y1) = ramp[0], ramp[-1]
        slope = (y1 - y0) / (x1 - x0)
        offset = slope * x0 - y0  # low / (high - low)
        if offset > 0:
            high = float(f"{(1.0 + offset) / offset:.4g}")
            candidates.append(Llama3Scaling(factor, 1.0, high, round(slope / offset)))
    return candidates
