"""DP-muP: from shapes of a narrow proxy and a wide target to noise, clip shares and rates.

The narrow model is the proxy, the wide one the target (primed). The metric of a layer is the
spectral norm of its noise, m = sqrt(n_out) + sqrt(n_in) for a standard Gaussian matrix. A layer's
clipped signal has low rank and spectral norm of about C D, so its signal-to-noise ratio is
D / (sigma m). Keeping that ratio at every width, with sum(D ** 2) == 1 at both ends, fixes the
noise of the proxy and the clip shares of the target. A rate then keeps the spectral norm of an
update at sqrt(n_out / n_in), as muP does for updates without noise (Yang et al. 2023,
arXiv 2310.17813).

**With a random projection** of rank r, entries of standard deviation s, nothing of this changes but
a factor on the rate. Take a layer with gradient G, projected on the right (the left is alike). The
private gradient of the subspace, G P + N with entries of N of standard deviation sigma C, is lifted
to (G P + N) P.T. Its signal has the mean G E[P P.T] = r s**2 G. Each entry of N P.T is a sum of r
products and has variance r s**2 (sigma C)**2. Both are thus what they are in full space, up to
factors that do not depend on the width: with g = sqrt(r) s, an update is g times as large after
clipping to a given norm, in signal (whose projection is g times as long before it) and in noise
alike. So neither rank nor the number of refreshes enters the ratio of signal to noise on the
activations; only g, which is 1 for s = 1/sqrt(r), enters the rate.

What does depend on them is the spectral norm of the noise that a weight accumulates. Over K
subspaces it is a product of Gaussian matrices with inner dimension R = r K, and Chevet's inequality
bounds its expectation by (sqrt(n_out) + sqrt(n_in) + sqrt(n_out n_in / R)) times the standard
deviation of an entry. The last term lies in R directions that do not depend on the data, so an
activation meets it no more than it meets any other direction. It is why a rule that holds this
norm still (one with (sqrt(k) + sqrt(r)) (sqrt(p) + sqrt(r)), or with R in place of r) lowers
the rate of wide models too much; `docs/dpmup.md` has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

OptimizerKind = Literal["sgd", "adam", "muon"]
LayerKind = Literal["matrix", "lookup", "vector"]


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A weight as a map from `n_in` to `n_out` features.

    Attributes:
        n_out: features that come out; the length of a vector.
        n_in: features that go in; for convolutions times the kernel's size. 1 for a lookup, which
            takes one row, and for a vector.
        kind: "matrix", "lookup" (embeddings, positions) or "vector" (norms, biases of their own).
        rank: rank of the projection; 0 if the weight is not projected.
        projection_stddev: standard deviation of the projection's entries; None for 1/sqrt(rank).
        is_hidden: whether DP-Muon orthogonalizes the weight's steps.
    """

    n_out: int
    n_in: int
    kind: LayerKind = "matrix"
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
    def noise_metric(self) -> float:
        """Spectral norm of standard Gaussian noise on the weight; of a vector, its maximum."""
        if self.kind == "vector":
            return max(1.0, math.sqrt(2 * math.log(self.n_out)))
        return math.sqrt(self.n_out) + math.sqrt(self.n_in)

    @property
    def gain(self) -> float:
        """Factor on an update by projecting and lifting it."""
        if not self.rank or self.projection_stddev is None:
            return 1.0
        return math.sqrt(self.rank) * self.projection_stddev

    @property
    def natural_rate(self) -> float:
        """Rate, up to a constant, that gives a unit of noise the norm sqrt(n_out / n_in)."""
        return math.sqrt(self.n_out / self.n_in) / (self.gain * self.noise_metric)

    def accumulated_noise_metric(self, num_subspaces: int) -> float:
        """Bound on the spectral norm of noise with unit entries, gathered over some subspaces."""
        edge = math.sqrt(self.n_out) + math.sqrt(self.n_in)
        if not self.rank:
            return edge
        return edge + math.sqrt(self.n_out * self.n_in / (self.rank * num_subspaces))


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

    Layers are paired by name. A layer of the target without a partner has an equal share of the
    clip norm and keeps the base rate. Vectors keep the size of an entry's step: the base rate under
    "adam", and under "sgd" that times the ratio of the noises.

    Guarantees:
        If all layers are paired, going to the target and back, with the shares that were found, is
        the identity.

    Args:
        proxy: shapes of the narrow model's layers, by name.
        target: shapes of the wide model's layers.
        optimizer: "sgd" keeps the noise's scale in its step; "adam" (and other methods that divide
            by the gradient's size) does not; "muon" orthogonalizes hidden matrices, which keep one
            rate at every width, and leaves the others to the rule of "adam".
        proxy_shares: the proxy's clip shares; None for equal ones.

    Raises:
        ValueError: no layer of the target has a partner.
    """
    paired = [name for name in target if name in proxy]
    if not paired:
        raise ValueError(
            "Expected layers of the same names in proxy and target, got none in common: "
            f"{sorted(proxy)[:3]} and {sorted(target)[:3]}; give both the same architecture."
        )
    shares = proxy_shares or dict.fromkeys(proxy, len(proxy) ** -0.5)
    growth = {name: target[name].noise_metric / proxy[name].noise_metric for name in paired}
    left = len(paired) / len(target)  # of the squared clip norm, after those without a partner
    noise_ratio = math.sqrt(sum((shares[name] * growth[name]) ** 2 for name in paired) / left)
    clip_shares = {name: len(target) ** -0.5 for name in target}
    rates = dict.fromkeys(target, 1.0)
    for name in paired:
        clip_shares[name] = shares[name] * growth[name] / noise_ratio
        rates[name] = _rate_ratio(proxy[name], target[name], optimizer, noise_ratio)
    return Transfer(noise_ratio=noise_ratio, clip_shares=clip_shares, rate_ratios=rates)


def _rate_ratio(
    proxy: LayerShape, target: LayerShape, optimizer: OptimizerKind, noise_ratio: float
) -> float:
    """Learning rate of a layer at the target over that at the proxy."""
    if target.kind == "vector":  # an entry of it moves by the noise, or by 1 after Adam's division
        return noise_ratio if optimizer == "sgd" else 1.0
    if optimizer == "muon" and target.is_hidden:
        return proxy.gain / target.gain
    ratio = target.natural_rate / proxy.natural_rate
    return ratio * noise_ratio if optimizer == "sgd" else ratio
