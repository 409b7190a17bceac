"""DP-muP: from shapes of a narrow proxy and a wide target to noise, clip shares and rates.

The narrow model is the proxy, the wide one the target (primed). The metric of a layer is the
spectral norm of its noise, m = sqrt(n_out) + sqrt(n_in) for a standard Gaussian matrix. A layer's
clipped signal has low rank and spectral norm of about C D, so its signal-to-noise ratio is
D / (sigma m). Keeping that ratio at every width, with sum(D ** 2) == 1 at both ends, fixes the
noise of the proxy and the clip shares of the target. A rate then keeps the spectral norm of an
update at sqrt(n_out / n_in), as muP does for updates without noise (Yang et al. 2023,
arXiv 2310.17813).

With DP-GRAPE's projection the noise lives in k x r, where k is the side that is kept and p the one
that shrinks to r, and a lifted step has a spectral norm of about
s (sqrt(k) + sqrt(r)) (sqrt(p) + sqrt(r)) with s the standard deviation of the projection's entries.
That part is this project's own derivation and counts one subspace at a time: a hypothesis, to be
confirmed for a model by a coordinate check.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

OptimizerKind = Literal["sgd", "adam", "muon"]


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A weight as a map from `n_in` to `n_out` features.

    Attributes:
        n_out: features that come out.
        n_in: features that go in; for convolutions times the kernel's size.
        rank: rank of the projection; 0 if the weight is not projected.
        projection_stddev: standard deviation of the projection's entries; None for 1/sqrt(rank).
        is_hidden: whether both sides grow with the width, as DP-Muon's rule distinguishes.
    """

    n_out: int
    n_in: int
    rank: int = 0
    projection_stddev: float | None = None
    is_hidden: bool = True

    def __post_init__(self) -> None:
        """Refuses shapes that are none."""
        if self.n_out < 1 or self.n_in < 1 or self.rank < 0:
            raise ValueError(
                f"Expected positive `n_out` and `n_in` and a `rank` of at least 0, got {self}."
            )

    @property
    def is_projected(self) -> bool:
        """Whether the smaller side shrinks to the rank."""
        return 0 < self.rank < min(self.n_out, self.n_in)

    @property
    def noise_metric(self) -> float:
        """Spectral norm of standard Gaussian noise where it is added."""
        if self.is_projected:
            return math.sqrt(max(self.n_out, self.n_in)) + math.sqrt(self.rank)
        return math.sqrt(self.n_out) + math.sqrt(self.n_in)

    @property
    def step_metric(self) -> float:
        """Spectral norm, up to a constant, that a unit of noise has on the weight itself."""
        if not self.is_projected:
            return self.noise_metric
        stddev = self.projection_stddev or self.rank**-0.5
        shrunk = math.sqrt(min(self.n_out, self.n_in)) + math.sqrt(self.rank)
        return stddev * self.noise_metric * shrunk

    @property
    def natural_rate(self) -> float:
        """Rate, up to a constant, that gives a unit of noise the norm sqrt(n_out / n_in)."""
        return math.sqrt(self.n_out / self.n_in) / self.step_metric


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What to use at the target, relative to what was tuned at the proxy.

    Attributes:
        noise_ratio: noise multiplier of the proxy over that of the target.
        clip_shares: the target's share of the clip norm per layer; squares sum to 1.
        rate_ratios: learning rate at the target over that at the proxy, per layer.
    """

    noise_ratio: float
    clip_shares: Mapping[str, float]
    rate_ratios: Mapping[str, float]


def transfer(
    proxy: Mapping[str, LayerShape],
    target: Mapping[str, LayerShape],
    *,
    optimizer: OptimizerKind,
    proxy_shares: Mapping[str, float] | None = None,
) -> Transfer:
    """Noise, clip shares and rates for a target from a proxy.

    Norm scales, biases and other vectors are not layers here: they keep the base rate, a bias that
    of its weight.

    Guarantees:
        Going to the target and back, with the shares that were found, is the identity.

    Args:
        proxy: shapes of the narrow model's weights, by name.
        target: shapes of the wide model's weights, under the same names.
        optimizer: "sgd" keeps the noise's scale in its step; "adam" (and other methods that divide
            by the gradient's size) does not; "muon" orthogonalizes hidden matrices, which keep one
            rate at every width, and leaves the others to the rule of "adam".
        proxy_shares: the proxy's clip shares; None for equal ones.

    Raises:
        ValueError: the names differ, or there are none.
    """
    if not proxy or proxy.keys() != target.keys():
        alone = sorted(proxy.keys() ^ target.keys())
        raise ValueError(
            f"Expected the same weights in proxy and target, got these on one side only: {alone}; "
            "give both the same number of layers."
        )
    shares = proxy_shares or dict.fromkeys(proxy, len(proxy) ** -0.5)
    growth = {name: target[name].noise_metric / proxy[name].noise_metric for name in proxy}
    noise_ratio = math.sqrt(sum((shares[name] * growth[name]) ** 2 for name in proxy))
    rates = {}
    for name in proxy:
        if optimizer == "muon" and target[name].is_hidden:
            rates[name] = 1.0
            continue
        ratio = target[name].natural_rate / proxy[name].natural_rate
        rates[name] = ratio * noise_ratio if optimizer == "sgd" else ratio
    return Transfer(
        noise_ratio=noise_ratio,
        clip_shares={name: shares[name] * growth[name] / noise_ratio for name in proxy},
        rate_ratios=rates,
    )
