"""The argument that says how noise is drawn."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_dpgrape.privacy.cipher import require_cipher


@dataclass
class NoiseArguments:
    """How the noise of a step is drawn."""

    secure_noise: bool = field(
        default=False,
        metadata={
            "help": "Draw the noise from a cryptographic generator (AES-256), without rounding "
            "errors, on a grid that the sum is rounded to: no floating-point attack on the noise, "
            "and no end to its tails. Epsilon is the same, noise grows by millionths. Needs "
            "`hf-dpgrape[secure]`."
        },
    )

    def refuse_without_cipher(self) -> None:
        """Refuses `secure_noise` where the cipher is not installed.

        Raises:
            ValueError: `cryptography` is missing.
        """
        if self.secure_noise:
            require_cipher()
